"""Sends the function of ``horoplug.run`` to the ranks and receives their results.

Each rank makes one connection, which begins with mutual authentication by the job's secret
(rendezvous/network/auth.py). Nothing is read before that, and the server only stores what it reads: the process that
called ``run`` unpickles it. After authentication:

    rank                                server
    rank u32                    ->
                                <-      length u64, function
    length u32, chunk  …        ->      written to the rank's file
    0 u32, verdict u8           ->
                                <-      "." once everything is stored

The verdict ``X`` withdraws the chunks so far; others follow. All numbers are big-endian."""

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
CHUNK_BYTES = 1 << 20
MAX_UNAUTHENTICATED = 256  # connections that may authenticate at the same time
_AUTH_SECONDS = 10.0
_CONTEXT = b"run"
_STORED = b"."
_U32, _U64 = struct.Struct("!I"), struct.Struct("!Q")


class Exchange:
    """The server. It has one thread per rank, since a rank exchanges one message of any size in each direction."""

    def __init__(self, secret: bytes, address: str, function: int, results: Sequence[int]) -> None:
        """``function``: descriptor of the file with the pickled function; ``results``: by rank, the descriptor of the
        file for its result. Errors: OSError if the address cannot be bound."""
        self._secret = secret
        self._function = function
        self._results = results
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._unauthenticated = 0
        self._taken: set[int] = set()
        self._closed = False
        self.returned: set[int] = set()
        """Ranks whose function has returned; the file has the result."""
        self.raised: list[int] = []
        """Ranks whose function has raised an exception, in that order; the file has the exception."""
        self.problems: dict[int, str] = {}
        """By rank, why its result could not be stored."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.address = address
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="horoplug-exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
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
                    threading.Event().wait(0.05)  # most likely out of descriptors
                continue
            with self._lock:
                if self._unauthenticated >= MAX_UNAUTHENTICATED:
                    sock.close()
                    continue
                self._unauthenticated += 1
                self._connections.add(sock)
            threading.Thread(target=self._serve, args=(sock, str(address[0])), daemon=True).start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            try:
                authenticate(sock, self._secret, Role.SERVER, _CONTEXT, _AUTH_SECONDS, peer)
            finally:
                with self._lock:
                    self._unauthenticated -= 1
            (rank,) = _U32.unpack(_receive(sock, _U32.size))
            with self._lock:
                if rank >= len(self._results) or rank in self._taken:
                    return
                self._taken.add(rank)
            self._send_function(sock)
            self._store(sock, rank)
        except (OSError, AuthenticationError):
            pass  # the connection has ended; a rank's failure is known from the end of its process
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
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while True:
            (length,) = _U32.unpack(_receive(sock, _U32.size))
            if length == 0:
                verdict = _receive(sock, 1)
                if verdict != WITHDRAWN:
                    break
                os.ftruncate(file, 0)
                os.lseek(file, 0, os.SEEK_SET)
            while length:
                chunk = buffer[: min(length, CHUNK_BYTES)]
                _receive_into(sock, chunk)
                length -= len(chunk)
                try:
                    _write(file, chunk)
                except OSError as error:
                    self.problems[rank] = error.strerror or str(error)
                    return
        if verdict == RETURNED:
            self.returned.add(rank)
        else:
            self.raised.append(rank)
        sock.sendall(_STORED)


class Client:
    """A rank's connection to the launcher. All methods raise OSError if the launcher has ended."""

    def __init__(self, address: str, port: int, secret: bytes, rank: int) -> None:
        """Connect. Errors: OSError, AuthenticationError."""
        self._sock = socket.create_connection((address, port), timeout=30.0)
        peer = f"the launcher at {address}:{port}"
        authenticate(self._sock, secret, Role.CLIENT, _CONTEXT, _AUTH_SECONDS, peer)
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock.sendall(_U32.pack(rank))

    def function(self) -> bytearray:
        """The pickled function and its arguments."""
        (length,) = _U64.unpack(_receive(self._sock, _U64.size))
        return _receive(self._sock, length)

    def write(self, data: bytes) -> int:
        """Send a part of the result. Makes this object a file that pickle can write to."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._sock.sendall(_U32.pack(len(chunk)))
            self._sock.sendall(chunk)
        return len(view)

    def finish(self, verdict: bytes) -> None:
        """Send the verdict on the parts so far; returns when the server has stored them."""
        self._sock.sendall(_U32.pack(0) + verdict)
        if verdict != WITHDRAWN:
            _receive(self._sock, 1)


def _receive(sock: socket.socket, length: int) -> bytearray:
    """Receive exactly ``length`` bytes. Errors: ConnectionError if the stream ends before."""
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
