"""The address under which other hosts reach this one, and the addresses of a host name."""

from __future__ import annotations

import ipaddress
import socket

from horoplug.rendezvous.network.interfaces import interface_address, interfaces

# Addresses reserved for documentation. Nothing is sent to them; the route to them is the default route.
_REMOTE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def own_address(interface: str | None = None) -> str:
    """The address under which other hosts reach this one.

    This is the address of ``interface`` if given, else the source address of the default route. Without a default route
    it is the host's first address. Errors: ValueError for an unknown interface, OSError if the addresses cannot be
    listed."""
    if interface:
        return interface_address(interface)
    for family, address in _REMOTE:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((address, 9))
                return str(sock.getsockname()[0])
            except OSError:
                continue
    # Loopback comes last in the list, so that it is chosen only on a host without a network.
    return next((each.address for each in interfaces()), loopback())


def loopback() -> str:
    """The address under which the processes of this host reach each other: 127.0.0.1, or ::1 on a host without IPv4."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return "::1"
    return "127.0.0.1"


def addresses(name: str) -> list[str]:
    """The addresses of a host, IPv4 first.

    A loopback address (localhost, or Debian's 127.0.1.1 for the host's own name) is replaced by :func:`own_address`,
    which other hosts can use. Errors: OSError if the name is unknown."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda each: each[0] != socket.AF_INET)
    texts = dict.fromkeys(str(each[4][0]) for each in ordered)
    return list(dict.fromkeys(own_address() if is_loopback(text) else text for text in texts))


def is_loopback(address: str) -> bool:
    """Whether an address reaches only this host. ``address``: IPv4 or IPv6, as text."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
