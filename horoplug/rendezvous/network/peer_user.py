"""Asks the kernel which user runs the process at the other end of a Unix socket.

Abstract Unix sockets have no permissions: every process of the network namespace can connect to them, and can read
their names. The ranks of a job belong to one user. A process of another user is refused before anything that it sends
is read."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")  # ucred of SO_PEERCRED: process, user, group


def peer_user(sock: socket.socket) -> int:
    """The user id of the process at the other end; -1 if unknown. For a listening process, it is the user id that the
    process had when it began to listen."""
    try:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[1])
    except OSError:
        return -1


def is_own_user(sock: socket.socket) -> bool:
    """Whether a process of this user is at the other end of a connected Unix socket."""
    return peer_user(sock) == os.geteuid()
