"""Sends the function of ``horoplug.run`` to the ranks and receives their results.

Each rank makes one connection, which begins with mutual authentication by the job's secret
(rendezvous/network/auth.py). Only authenticated messages follow (rendezvous/network/messages.py), so that nothing from
another source is stored or unpickled. They are encrypted if the rank's settings say so. The server only stores what it
reads; the process that called ``run`` unpickles it.

    rank                                server
    rank u32                    ->
                                <-      length of the function u64
                                <-      chunk of the function  …
    "+", chunk of the result  … ->      written to the rank's file
    verdict                     ->
                                <-      "." once everything is stored

The verdict ``X`` withdraws the chunks so far; others follow. All numbers are big-endian."""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Sequence

from horoplug.base.errors import ProtocolError, TamperedMessageError
from horoplug.rendezvous.network import dial
from horoplug.rendezvous.network.auth import Encryption
from horoplug.rendezvous.network.listener import Listener, bind
from horoplug.rendezvous.network.messages import MessageStream

RETURNED, RAISED, WITHDRAWN = b"R", b"F", b"X"
CHUNK_BYTES = 1 << 20
_CONNECT_SECONDS = 30.0  # limit for a rank to connect
_CONTEXT = b"run"
_CHUNK = b"+"
_STORED = b"."
_log = logging.getLogger("horoplug")
_U32, _U64 = struct.Struct("!I"), struct.Struct("!Q")


class Exchange:
    """The server. It has one thread per rank, since a rank exchanges one message of any size in each direction."""

    def __init__(
        self, secret: bytes, address: str, function: int, results: Sequence[int], port: int = 0
    ) -> None:
        """``function``: descriptor of the file with the pickled function; ``results``: by rank, the descriptor of the
        file for its result; ``port``: 0 takes a free one. Errors: OSError if the address cannot be bound."""
        self._function = function
        self._results = results
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self.returned: set[int] = set()
        """Ranks whose function has returned; the file has the result."""
        self.raised: list[int] = []
        """Ranks whose function has raised an exception, in that order; the file has the exception."""
        self.problems: dict[int, str] = {}
        """Why the result of a rank could not be stored, by rank."""
        sock = bind(address, port)
        self.address = address
        self.port: int = sock.getsockname()[1]
        # The launcher learns of a failed rank when its process ends, whatever has ended the connection.
        self._listener = Listener(
            [sock], secret, _CONTEXT, Encryption.AS_CLIENT, len(results), self._exchange
        )

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._listener.close()

    def _exchange(self, stream: MessageStream) -> None:
        try:
            (rank,) = _U32.unpack(stream.receive(_U32.size))
        except TamperedMessageError as error:
            _log.warning("horoplug.run: %s", error)  # the rank is unknown
            raise
        with self._lock:
            if rank >= len(self._results) or rank in self._taken:
                return
            self._taken.add(rank)
        try:
            self._send_function(stream)
            self._store(stream, rank)
        except TamperedMessageError as error:
            self.problems[rank] = str(error)

    def _send_function(self, stream: MessageStream) -> None:
        size = os.fstat(self._function).st_size
        stream.send(_U64.pack(size))
        for at in range(0, size, CHUNK_BYTES):
            stream.send(os.pread(self._function, CHUNK_BYTES, at))

    def _store(self, stream: MessageStream, rank: int) -> None:
        file = self._results[rank]
        while True:
            message = stream.receive(1 + CHUNK_BYTES)
            kind = message[:1]
            if kind in (RETURNED, RAISED):
                break
            if kind not in (_CHUNK, WITHDRAWN):
                raise ProtocolError(f"a message has the unknown kind {kind!r}")
            try:
                if kind == WITHDRAWN:
                    os.ftruncate(file, 0)
                    os.lseek(file, 0, os.SEEK_SET)
                else:
                    _write(file, memoryview(message)[1:])
            except OSError as error:
                self.problems[rank] = error.strerror or str(error)
                return
        if kind == RETURNED:
            self.returned.add(rank)
        else:
            self.raised.append(rank)
        stream.send(_STORED)


class Client:
    """A rank's connection to the launcher. All methods raise OSError if the launcher has ended, and
    TamperedMessageError."""

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        rank: int,
        encrypt: bool = False,
        seconds: float = _CONNECT_SECONDS,
    ) -> None:
        """Connect. ``encrypt``: whether the connection is encrypted; ``seconds``: limit for connecting.

        Errors: those of :func:`.dial.connect`; ValueError if the connection cannot be encrypted."""
        peer = f"the launcher at {address}:{port}"
        self._sock, channel = dial.connect(address, port, secret, _CONTEXT, seconds, peer, encrypt)
        self._stream = MessageStream(self._sock, channel)
        self._stream.send(_U32.pack(rank))

    def function(self) -> bytearray:
        """The pickled function and its arguments."""
        (length,) = _U64.unpack(self._stream.receive(_U64.size))
        function = bytearray()
        while len(function) < length:
            function += self._stream.receive(CHUNK_BYTES)
        return function

    def write(self, data: bytes) -> int:
        """Send a part of the result. Makes this object a file that pickle can write to."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            self._stream.send(_CHUNK, view[start : start + CHUNK_BYTES])
        return len(view)

    def finish(self, verdict: bytes) -> None:
        """Send the verdict on the parts so far; returns when the server has stored them."""
        self._stream.send(verdict)
        if verdict != WITHDRAWN:
            self._stream.receive(len(_STORED))


def _write(file: int, view: memoryview) -> None:
    while view:
        view = view[os.write(file, view) :]
