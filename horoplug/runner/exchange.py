"""How the ranks of ``horoplug.run`` get the function and give back what became of it.

Each rank makes one connection, which begins with the mutual proof of the job's secret (rendezvous/auth.py); before
that nothing is read, and what is read here is only ever stored: unpickling is left to those who asked for the function.
After the proof:

    rank                                server
    rank u32                    ->
                                <-      length u64, function
    length u32, piece  …        ->      written to the rank's file
    0 u32, verdict u8           ->
                                <-      "." when all is stored

A verdict of ``X`` takes back the pieces so far; others follow. All numbers are big-endian."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence

from horoplug.base.errors import AuthenticationError
from horoplug.rendezvous.network.auth import Role, authenticate

RETURNED, RAISED, WITHDRAWN = b"R", b"F", b"X"
PIECE = 1 << 20  # bytes
MAX_WAITING = 256  # connections that have not proved anything yet
_AUTH_SECONDS = 10.0
_CONTEXT = b"run"
_STORED = b"."
_U32, _U64 = struct.Struct("!I"), struct.Struct("!Q")


class Exchange:
    """The server. It has a thread for each rank, since there is one message of any size each way."""

    def __init__(self, secret: bytes, address: str, function: int, results: Sequence[int]) -> None:
        """``function``: descriptor of a file with what every rank gets; ``results``: by rank, of a file for what it
        gives back. Errors: OSError if the address cannot be bound."""
        self._secret = secret
        self._function = function
        self._results = results
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._waiting = 0
        self._taken: set[int] = set()
        self._closed = False
        self.returned: set[int] = set()
        """Ranks whose function has returned; their result is in their file."""
        self.raised: list[int] = []
        """Ranks whose function has raised something, in that order; what it was is in their file."""
        self.problems: dict[int, str] = {}
        """By rank, why what it sent could not be stored."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.address = address
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="horoplug-exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread up
        self._thread.join()
        self._listener.close()
        with self._lock:
            for sock in self._connections:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if not self._closed:
                    threading.Event().wait(0.05)  # out of descriptors, most likely
                continue
            with self._lock:
                if self._waiting >= MAX_WAITING:
                    sock.close()
                    continue
                self._waiting += 1
                self._connections.add(sock)
            threading.Thread(target=self._serve, args=(sock, str(address[0])), daemon=True).start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            try:
                authenticate(sock, self._secret, Role.SERVER, _CONTEXT, _AUTH_SECONDS, peer)
            finally:
                with self._lock:
                    self._waiting -= 1
            (rank,) = _U32.unpack(_receive(sock, _U32.size))
            with self._lock:
                if rank >= len(self._results) or rank in self._taken:
                    return
                self._taken.add(rank)
            self._send_function(sock)
            self._store(sock, rank)
        except (OSError, AuthenticationError):
            pass  # whoever it was has gone; what became of a rank is known from its end
        finally:
            with self._lock:
                self._connections.discard(sock)
            sock.close()

    def _send_function(self, sock: socket.socket) -> None:
        size = os.fstat(self._function).st_size
        sock.sendall(_U64.pack(size))
        at = 0
        while at < size:
            at += os.sendfile(sock.fileno(), self._function, at, size - at)

    def _store(self, sock: socket.socket, rank: int) -> None:
        file = self._results[rank]
        buffer = memoryview(bytearray(PIECE))
        while True:
            (length,) = _U32.unpack(_receive(sock, _U32.size))
            if length == 0:
                verdict = _receive(sock, 1)
                if verdict != WITHDRAWN:
                    break
                os.ftruncate(file, 0)
                os.lseek(file, 0, os.SEEK_SET)
            while length:
                piece = buffer[: min(length, PIECE)]
                _receive_into(sock, piece)
                length -= len(piece)
                try:
                    _write(file, piece)
                except OSError as error:
                    self.problems[rank] = error.strerror or str(error)
                    return
        if verdict == RETURNED:
            self.returned.add(rank)
        else:
            self.raised.append(rank)
        sock.sendall(_STORED)


class Client:
    """A rank's connection. Everything it does raises OSError if the launcher is not there any more."""

    def __init__(self, address: str, port: int, secret: bytes, rank: int) -> None:
        """Connect. Errors: OSError, AuthenticationError."""
        self._sock = socket.create_connection((address, port), timeout=30.0)
        peer = f"the launcher at {address}:{port}"
        authenticate(self._sock, secret, Role.CLIENT, _CONTEXT, _AUTH_SECONDS, peer)
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock.sendall(_U32.pack(rank))

    def function(self) -> bytearray:
        """What every rank gets."""
        (length,) = _U64.unpack(_receive(self._sock, _U64.size))
        return _receive(self._sock, length)

    def write(self, data: bytes) -> int:
        """Send a part of what became of the function; makes this a file to pickle into."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            self._sock.sendall(_U32.pack(len(piece)))
            self._sock.sendall(piece)
        return len(view)

    def finish(self, verdict: bytes) -> None:
        """Say what the parts so far were; returns when they have been stored."""
        self._sock.sendall(_U32.pack(0) + verdict)
        if verdict != WITHDRAWN:
            _receive(self._sock, 1)


def _receive(sock: socket.socket, length: int) -> bytearray:
    """Exactly ``length`` bytes. Errors: ConnectionError if the stream ends before."""
    data = bytearray(length)
    _receive_into(sock, memoryview(data))
    return data


def _receive_into(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise ConnectionResetError("the connection has ended")
        view = view[count:]


def _write(file: int, view: memoryview) -> None:
    while view:
        view = view[os.write(file, view) :]
