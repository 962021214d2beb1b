"""The store's client: one authenticated connection of one process."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from horoplug.base.errors import (
    PeerLostError,
    ProtocolError,
    RankTakenError,
    RendezvousError,
    StoreTimeoutError,
    TamperedMessageError,
)
from horoplug.rendezvous.network import dial
from horoplug.rendezvous.network.fork import close_in_children
from horoplug.rendezvous.network.messages import MessageChannel
from horoplug.rendezvous.store import protocol
from horoplug.rendezvous.store.protocol import Op, Reader, Reply

_LONG = 3600.0  # seconds
_GRACE = 5.0  # seconds that an answer may arrive after the request's deadline


class AbandonedError(RendezvousError):
    """Another thread has abandoned the get for which this one waits."""


class PendingGet:
    """A GET in progress; see :meth:`StoreClient.begin_get`."""

    def __init__(self, tag: int, keys: Sequence[str], timeout: float) -> None:
        self.tag = tag
        self.keys = tuple(keys)
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.over = False


class StoreClient:
    """A connection to the store. A context manager.

    Thread-safe: several threads may wait at the same time. One of them waits for the connection, and wakes up others
    whose answers have arrived. A thread that waits for :meth:`fileno` itself must be the only one that waits."""

    def __init__(self, sock: socket.socket, channel: MessageChannel, peer: str) -> None:
        """``sock``: a connected and authenticated socket, see :meth:`connect`; ``channel``: authenticates the messages
        on it; ``peer``: names the server in error messages."""
        sock.setblocking(False)
        self._sock = sock
        self._channel = channel
        self._peer = peer
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._is_awaited = False  # whether a thread waits for the connection
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # ends that wait
        self._tags = itertools.count(1)
        self._inbox = bytearray()
        self._answers: dict[int, tuple[int, bytes]] = {}
        self._abandoned: set[int] = set()  # tags whose answers are discarded on arrival
        self._owner = os.getpid()
        self._registered = False
        self._end: RendezvousError | None = (
            None  # the error of every later call, once the connection has ended
        )
        close_in_children(self)

    @classmethod
    def connect(
        cls, address: str, port: int, secret: bytes, timeout: float, *, encrypt: bool = False
    ) -> StoreClient:
        """Connect and authenticate. Retry for ``timeout`` seconds while the server does not accept connections, or
        while a process that has not proved to know the secret answers in its place.

        ``encrypt``: whether the connection is encrypted.

        Errors after ``timeout`` seconds: AuthenticationError in the second case, otherwise RendezvousError."""
        peer = _name(address, port)
        return cls(
            *dial.connect(address, port, secret, protocol.AUTH_CONTEXT, timeout, peer, encrypt),
            peer,
        )

    @classmethod
    def attempt(
        cls, address: str, port: int, secret: bytes, timeout: float, *, encrypt: bool = False
    ) -> StoreClient:
        """Make one attempt to connect and authenticate. Errors: AuthenticationError; OSError if nobody answers."""
        peer = _name(address, port)
        return cls(
            *dial.attempt(address, port, secret, protocol.AUTH_CONTEXT, timeout, peer, encrypt),
            peer,
        )

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor for a selector; it is readable when an answer may have arrived."""
        return self._sock.fileno()

    @property
    def local_address(self) -> str:
        """This process's address on the network over which it reaches the server."""
        return str(self._sock.getsockname()[0])

    # ---- requests ----------------------------------------------------------------------------------------------------

    def register(self, rank: int) -> None:
        """Register this process as ``rank``. If the connection ends without :meth:`close`, the rank counts as lost.

        May be repeated. Errors: RankTakenError if another live process has registered as the rank."""
        description = f"pid {os.getpid()} on {socket.gethostname()}"
        payload = protocol.pack_rank(rank) + protocol.pack_text(description)
        kind, reader = self._call(Op.REGISTER, payload)
        if kind == Reply.TAKEN:
            raise RankTakenError(
                f"rank {rank} of this job is already taken by another process ({reader.text()})"
            )
        self._registered = True

    def set(self, key: str, value: bytes) -> None:
        """Set a key, or replace its value."""
        self._call(Op.SET, protocol.pack_key(key.encode()) + protocol.pack_value(value))

    def claim(self, key: str, value: bytes) -> bool:
        """Set a key that is not set yet. Returns False if it is."""
        kind, _ = self._call(Op.CLAIM, protocol.pack_key(key.encode()) + protocol.pack_value(value))
        return kind == Reply.OK

    def get(
        self, keys: Sequence[str], timeout: float, owners: Sequence[int] | None = None
    ) -> list[bytes]:
        """The values of ``keys``, once all of them are set. ``owners``: the rank that sets each key; -1 if unknown;
        ANY_RANK if it is not set without any one of the ranks.

        Errors: StoreTimeoutError after ``timeout`` seconds; PeerLostError if any owner is lost while a key is missing,
        even an owner whose own key is set."""
        return self.wait_get(self.begin_get(keys, timeout, owners))

    def begin_get(
        self, keys: Sequence[str], timeout: float, owners: Sequence[int] | None = None
    ) -> PendingGet:
        """Start a get without waiting. Call :meth:`poll_get` when :meth:`fileno` is readable, or :meth:`abandon`."""
        who = owners if owners is not None else [-1] * len(keys)
        pending = PendingGet(next(self._tags), keys, timeout)
        payload = protocol.pack_get(timeout, [key.encode() for key in keys], who)
        with self._lock:
            self._send(protocol.pack(Op.GET, pending.tag, payload))
        return pending

    def poll_get(self, pending: PendingGet) -> list[bytes] | None:
        """The values, or None while they are not complete. Errors: those of :meth:`get`."""
        with self._lock:
            if not self._is_awaited:
                self._receive()
            if pending.tag not in self._answers and self._end is not None:
                raise self._end
            return self._take(pending)

    def _take(self, pending: PendingGet) -> list[bytes] | None:
        """The values, or None if they have not arrived. Needs the lock."""
        answer = self._answers.pop(pending.tag, None)
        if answer is None:
            return None
        pending.over = True
        kind, reader = self._check_answer(answer)
        if kind == Reply.TIMED_OUT:
            missing = [reader.u32() for _ in range(reader.u32())]
            reader.end()
            names = ", ".join(pending.keys[i] for i in missing if i < len(pending.keys))
            raise StoreTimeoutError(missing, f"not set within {pending.timeout:g} s: {names}")
        if kind != Reply.VALUES:
            raise ProtocolError(
                f"{self._peer} sent an answer of another form than the request asks for"
            )
        values = [reader.value() for _ in pending.keys]
        reader.end()
        return values

    def wait_get(self, pending: PendingGet) -> list[bytes]:
        """Wait for the values. After an error the get is over. Errors: those of :meth:`get`; AbandonedError if another
        thread calls :meth:`abandon`."""
        while (values := self.wait_get_for(pending, _LONG)) is None:
            pass
        return values

    def wait_get_for(self, pending: PendingGet, seconds: float) -> list[bytes] | None:
        """The same for so many seconds. Returns None if the values have not arrived by then."""
        until = min(time.monotonic() + seconds, pending.deadline + _GRACE)
        try:
            with self._lock:
                there = self._await(lambda: pending.over or pending.tag in self._answers, until)
                values = self._take(pending)
            if values is None and there:
                raise AbandonedError("the get was abandoned")
            if values is None and until == pending.deadline + _GRACE:
                raise RendezvousError(f"{self._peer} does not answer")
            return values
        except BaseException:
            self.abandon(pending)
            raise

    def abandon(self, pending: PendingGet) -> None:
        """Cancel a get, for which another thread may wait: its answer is discarded. Idempotent; does nothing if the get
        has been answered."""
        with self._lock:
            if pending.over:
                return
            pending.over = True
            if self._answers.pop(pending.tag, None) is None:
                self._abandoned.add(pending.tag)
            self._arrived.notify_all()
            if self._is_awaited:
                os.eventfd_write(self._wake, 1)

    def delete(self, prefix: str) -> None:
        """Delete all keys that begin with ``prefix``, and all aborts of such prefixes."""
        self._call(Op.DELETE, protocol.pack_key(prefix.encode()))

    def abort(self, prefix: str, rank: int, reason: str) -> None:
        """Make every get of a missing key with this prefix fail with PeerLostError(rank, reason), now and later."""
        payload = (
            protocol.pack_rank(rank)
            + protocol.pack_text(reason)
            + protocol.pack_key(prefix.encode())
        )
        self._call(Op.ABORT, payload)

    def close(self) -> None:
        """Send LEAVE, so that this rank does not count as lost, and close the connection. Idempotent; never raises."""
        if self._sock.fileno() < 0:
            return
        try:
            if self._registered and os.getpid() == self._owner:
                self._call(Op.LEAVE, b"", timeout=1.0)
        except (OSError, RendezvousError):
            pass  # the server has ended already
        self._close()

    def forget(self) -> None:
        """Close this process's descriptors silently (for a forked child, see fork.py)."""
        self._close()

    def _close(self) -> None:
        if self._sock.fileno() >= 0:
            self._sock.close()
            os.close(self._wake)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _call(self, op: Op, payload: bytes, timeout: float = 30.0) -> tuple[int, Reader]:
        deadline = time.monotonic() + timeout
        with self._lock:
            tag = next(self._tags)
            self._send(protocol.pack(op, tag, payload))
            if not self._await(lambda: tag in self._answers, deadline):
                raise RendezvousError(f"{self._peer} does not answer")
            return self._check_answer(self._answers.pop(tag))

    def _check_answer(self, answer: tuple[int, bytes]) -> tuple[int, Reader]:
        kind, reader = answer[0], Reader(answer[1])
        if kind == Reply.LOST:
            rank, text = reader.rank(), reader.text()
            raise PeerLostError(rank, text)
        if kind == Reply.REFUSED:
            raise RendezvousError(f"{self._peer} refused: {reader.text()}")
        return kind, reader

    def _send(self, message: bytes) -> None:
        if isinstance(self._end, TamperedMessageError):
            raise self._end
        view = memoryview(self._channel.seal(message))
        deadline = time.monotonic() + 30.0
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                self._await_room(deadline)
            except OSError as error:
                raise self._gone(error) from None

    def _receive(self) -> None:
        """Read and parse what has arrived, without waiting. Answers sent before the connection ended still count."""
        while self._end is None:
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                self._end = self._gone(error)
                break
            if not data:
                self._end = self._gone(None)
            self._inbox += data
        try:
            while not isinstance(self._end, TamperedMessageError):
                message = self._channel.take(self._inbox, protocol.MAX_REPLY)
                if message is None:
                    break
                kind, tag, payload = protocol.unpack(message)
                if tag in self._abandoned:
                    self._abandoned.remove(tag)
                else:
                    self._answers[tag] = kind, payload
        except TamperedMessageError as error:
            self._end = error
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _await(self, is_there: Callable[[], bool], deadline: float) -> bool:
        """Receive until ``is_there()``, at most until the deadline. Needs the lock, which is free while this waits.

        Returns whether it is there. Errors: RendezvousError when the connection has ended."""
        while True:
            if not self._is_awaited:
                self._receive()
            if is_there():
                return True
            if self._end is not None:
                raise self._end
            if self._is_awaited:
                in_time = self._arrived.wait(max(deadline - time.monotonic(), 0))
            else:
                in_time = self._await_connection(deadline)
            if not in_time:
                return False

    def _await_connection(self, deadline: float) -> bool:
        """Wait until something has arrived, or another thread has abandoned a get. Returns whether it was in time."""
        if self._sock.fileno() < 0:
            raise RendezvousError(f"the connection to {self._peer} is closed")
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        self._is_awaited = True
        self._lock.release()
        try:
            events = poll.poll(max(deadline - time.monotonic(), 0) * 1000)
        finally:
            self._lock.acquire()
            self._is_awaited = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._arrived.notify_all()
        return bool(events)

    def _await_room(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise RendezvousError(f"{self._peer} does not answer")

    def _gone(self, error: OSError | None) -> RendezvousError:
        # Whether the kernel reports an end, a reset or a broken pipe depends on what was in flight.
        is_plain = error is None or isinstance(error, (ConnectionResetError, BrokenPipeError))
        why = f" ({error.strerror})" if error and error.strerror and not is_plain else ""
        return RendezvousError(f"{self._peer} has closed the connection{why}; did the job end?")


def _name(address: str, port: int) -> str:
    return f"the rendezvous server at {address}:{port}"
