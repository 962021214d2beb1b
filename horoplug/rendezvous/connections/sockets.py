"""The sockets of connections between ranks: listeners and socket options."""

from __future__ import annotations

import secrets
import socket

SPARE_INCOMING = 64
"""Unfinished incoming connections allowed beyond those expected."""

_BUFFER_BYTES = 1073741824

Address = tuple[str, int] | str
"""Where a rank listens: host and port, or on this host the name of its Unix socket."""


def unix_listener(size: int) -> tuple[str, socket.socket]:
    """Listen on a random name in the abstract namespace. Returns the name, without its leading zero byte, and the
    nonblocking listener."""
    name = f"horoplug-{secrets.token_hex(12)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + name)
        sock.listen(size + SPARE_INCOMING)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return name, sock


def tcp_listener(address: str, connections: int) -> socket.socket:
    """Listen on a free port of ``address`` only, with a backlog for ``connections`` at once. Nonblocking."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.create_server((address, 0), family=family, backlog=connections + SPARE_INCOMING)
    sock.setblocking(False)
    return sock


def tune_tcp(sock: socket.socket, data_timeout: float) -> None:
    """Set the socket options of a connection between ranks.

    ``data_timeout``: seconds without an acknowledgement after which the kernel breaks the connection; negative: the
    kernel's own limits apply."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A host that vanishes silently is noticed after data_timeout, whether or not there is data to send.
    if data_timeout >= 0:
        seconds = max(int(data_timeout), 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(seconds // 3, 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(seconds // 6, 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
    # A fixed buffer size turns the kernel's autotuning off. It helps only if it exceeds the largest size of autotuning.
    for option, name in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if _kernel_limit(name) >= _BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _kernel_limit(name: str) -> int:
    """Bytes that a socket buffer may have; 0 if unknown."""
    try:
        with open(f"/proc/sys/net/core/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
