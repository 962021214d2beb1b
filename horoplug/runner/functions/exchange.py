"""Sends the function of ``horoplug.run`` to the ranks and receives their results.

Each rank has a number: its rank or, in an elastic job, the number of its process, which no other process ever has. It
makes one connection, which begins with mutual authentication by the job's secret (rendezvous/network/auth.py). Only
authenticated messages follow (rendezvous/network/messages.py), so that nothing from another source is stored or
unpickled. They are encrypted if the rank's settings say so. The server only stores what it reads; the process that
called ``run``, or Spark's driver, unpickles it at the end.

    rank                                server
    number u32                  ->
                                <-      length of the function u64
                                <-      chunk of the function  …
    "+", chunk of the result  … ->      written to the rank's file
    verdict                     ->
                                <-      "." once everything is stored

The verdict ``X`` withdraws the chunks so far; others follow. All numbers are big-endian."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import struct
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from horoplug.base.descriptors import reason
from horoplug.base.errors import ProtocolError, TamperedMessageError
from horoplug.rendezvous.network import dial
from horoplug.rendezvous.network.auth import Encryption
from horoplug.rendezvous.network.listener import Listener, bind
from horoplug.rendezvous.network.messages import MessageStream
from horoplug.runner.ending.results import Results

RETURNED, RAISED, WITHDRAWN = b"R", b"F", b"X"
CHUNK_BYTES = 1 << 20
_CONNECT_SECONDS = 30.0  # limit for a rank to connect
_CONTEXT = b"run"
_CHUNK = b"+"
_STORED = b"."
_log = logging.getLogger("horoplug")
_U32, _U64 = struct.Struct("!I"), struct.Struct("!Q")


class ResultFiles:
    """Makes anonymous temporary files for the results when they are needed. They exist until this process ends, since
    threads of the exchange may still write."""

    def __init__(self, folder: str, size: int, most: int) -> None:
        """``folder``: where the files are; ``size``: the number of ranks that may connect at once; ``most``: the
        numbers are less than that."""
        self._folder = folder
        self._size = size
        self._most = most
        self._files: dict[int, int] = {}

    def __len__(self) -> int:
        """The number of ranks that may connect at once."""
        return self._size

    def __getitem__(self, number: int, /) -> int:
        """The descriptor of a rank's file. Errors: IndexError if there is no such rank; OSError."""
        if number >= self._most:
            raise IndexError(number)
        if number not in self._files:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._files[number] = os.dup(file.fileno())
        return self._files[number]

    def move(self, number: int, target: int) -> int:
        """Append the file of a rank that has finished to another one, given by its descriptor, and delete it. Returns
        where it begins there. Errors: OSError."""
        start = os.lseek(target, 0, os.SEEK_CUR)
        with open(self._files.pop(number), "rb", buffering=0) as file:
            file.seek(0)
            while data := file.read(CHUNK_BYTES):
                _write(target, memoryview(data))
        return start


class Exchange:
    """The server. It has one thread per rank, since a rank exchanges one message of any size in each direction."""

    def __init__(
        self, secret: bytes, address: str, function: int, files: ResultFiles, port: int = 0
    ) -> None:
        """``function``: descriptor of the file with the pickled function; ``files``: for the results, by number;
        ``port``: 0 takes a free one. Errors: OSError if the address cannot be bound."""
        self._function = function
        self._files = files
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self.returned: set[int] = set()
        """Numbers of ranks whose function has returned; the file has the result."""
        self.raised: list[int] = []
        """Numbers of ranks whose function has raised an exception, in that order; the file has the exception."""
        self.problems: dict[int, str] = {}
        """Why the result of a rank could not be stored, by its number."""
        sock = bind(address, port)
        self.address = address
        self.port: int = sock.getsockname()[1]
        # The launcher learns of a failed rank when its process ends, whatever has ended the connection.
        self._listener = Listener(
            [sock], secret, _CONTEXT, Encryption.AS_CLIENT, len(files), self._exchange
        )

    def results(self, processes: Sequence[int]) -> Results:
        """What has arrived. ``processes``: the numbers by rank."""
        return Results(processes, self.returned, self.raised, self.problems, self._load)

    def _load(self, number: int) -> Any:
        with open(self._files[number], "rb", closefd=False) as file:
            file.seek(0)
            return pickle.load(file)

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._listener.close()

    def _exchange(self, stream: MessageStream) -> None:
        try:
            (number,) = _U32.unpack(stream.receive(_U32.size))
        except TamperedMessageError as error:
            _log.warning("horoplug.run: %s", error)  # the rank is unknown
            raise
        with self._lock:
            if number in self._taken:
                return
            try:
                file = self._files[number]
            except IndexError:
                return
            except OSError as error:
                self.problems[number] = reason(error)
                return
            self._taken.add(number)
        try:
            self._send_function(stream)
            self._store(stream, number, file)
        except TamperedMessageError as error:
            self.problems[number] = str(error)
        finally:
            if number not in self.returned and number not in self.raised:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, 0)  # a rank that died may leave a large part

    def _send_function(self, stream: MessageStream) -> None:
        size = os.fstat(self._function).st_size
        stream.send(_U64.pack(size))
        for at in range(0, size, CHUNK_BYTES):
            stream.send(os.pread(self._function, CHUNK_BYTES, at))

    def _store(self, stream: MessageStream, number: int, file: int) -> None:
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
                self.problems[number] = error.strerror or str(error)
                return
        if kind == RETURNED:
            self.returned.add(number)
        else:
            self.raised.append(number)
        stream.send(_STORED)


class Client:
    """A rank's connection to the launcher. All methods raise OSError if the launcher has ended, and
    TamperedMessageError."""

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        number: int,
        encrypt: bool = False,
        seconds: float = _CONNECT_SECONDS,
    ) -> None:
        """Connect. ``number``: this rank's; ``encrypt``: whether the connection is encrypted; ``seconds``: limit for
        connecting.

        Errors: those of :func:`.dial.connect`; ValueError if the connection cannot be encrypted."""
        peer = f"the launcher at {address}:{port}"
        self._sock, channel = dial.connect(address, port, secret, _CONTEXT, seconds, peer, encrypt)
        self._stream = MessageStream(self._sock, channel)
        self._stream.send(_U32.pack(number))

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
