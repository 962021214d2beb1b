"""Connects the ranks of one host with each other through one of them, the *hub*.

Every rank of a host makes one connection to the hub, the lowest rank there, which authenticates both and carries the
rank's memfd and eventfd (peer_connection.py). For each pair of other ranks, the hub makes two connected sockets, and
sends one of them to each rank, together with the memfd and eventfd of the other rank. So n ranks need n - 1 handshakes,
not n (n - 1) / 2. Such sockets have no name, so that no other process can connect to them, and they reach the two ranks
over authenticated connections only.

    hub                                     member
    "HPhu", count u32, rank u32 …   ->      with stream, memfd and eventfd of each of these ranks
                                    <-      "HPok" for each message

Both are authenticated messages (network/messages.py). The hub waits for the answers to most of its messages before it
makes more pairs: the kernel limits the descriptors in transit, and the hub limits the descriptors that it has open."""

from __future__ import annotations

import array
import errno
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from horoplug.base.errors import PeerLostError, ProtocolError
from horoplug.rendezvous.connections.peer_connection import PeerConnection
from horoplug.rendezvous.network.messages import MessageChannel
from horoplug.rendezvous.store.client import StoreClient

Descriptors = tuple[int, int, int]
"""The descriptors that belong to one rank on this host: stream, memfd, eventfd."""

_HEADER = struct.Struct("!4sI")
_MAGIC = b"HPhu"
_ANSWER = b"HPok"
_BLOCK = 16  # the hub makes the pairs of two blocks of ranks at once
_UNDER_WAY = 512  # limit for descriptors in transit: the hub makes no further pairs above it
_PER_RANK = 3  # descriptors
_MOST_RANKS = 2 * _BLOCK  # in one message
_RIGHTS_SPACE = socket.CMSG_SPACE(_MOST_RANKS * _PER_RANK * 4)
_PAUSE = 0.002  # seconds until the kernel is asked again to take descriptors

HUB_DESCRIPTORS = 2 * _BLOCK * _BLOCK
"""How many descriptors the hub has open in addition to its own connections."""


class Endpoint(Protocol):
    """The state machine that :class:`HubLoop` runs: a :class:`Hub` or a :class:`Member`."""

    @property
    def done(self) -> bool:
        """Whether this rank has done its part."""

    @property
    def awaited(self) -> list[int]:
        """The ranks that this one waits for; not empty unless :attr:`done`."""

    def connections(self) -> Mapping[int, PeerConnection]:
        """The connections in use, by rank."""

    def advance(self, rank: int) -> None:
        """Send and receive on the connection to a rank what is possible without blocking. Errors: OSError,
        TamperedMessageError, ProtocolError."""

    def take_changes(self) -> Mapping[int, bool]:
        """Maps ranks to whether this end waits until it can send to them. Has only ranks for which that may have
        changed since the last call."""


class HubLoop:
    """The event loop of an endpoint. A context manager."""

    def __init__(self, endpoint: Endpoint, deadline: float) -> None:
        """``deadline``: the caller checks it after each :meth:`run_once`."""
        self._endpoint = endpoint
        self._deadline = deadline
        self._connections = endpoint.connections()
        self._selector = selectors.DefaultSelector()
        for rank, connection in self._connections.items():
            self._selector.register(connection.sock, selectors.EVENT_READ, rank)
        self._apply_changes()
        self._store_watched = False

    def __enter__(self) -> HubLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def run_once(self, store: StoreClient) -> None:
        """Wait for events on the connections or the store, and handle those on the connections.

        Errors: PeerLostError, TamperedMessageError, ProtocolError; OSError if this process has no descriptors left."""
        if not self._store_watched:
            self._store_watched = True
            self._selector.register(store, selectors.EVENT_READ)
        seconds = max(self._deadline - time.monotonic(), 0.0) + 0.001
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                continue
            try:
                self._endpoint.advance(key.data)
            except (BrokenPipeError, ConnectionError) as error:
                raise PeerLostError(
                    key.data,
                    f"rank {key.data} has ended or failed while the ranks of this host were connected: "
                    f"{error.strerror}",
                ) from None
        self._apply_changes()

    def _apply_changes(self) -> None:
        for rank, sends in self._endpoint.take_changes().items():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if sends else 0)
            self._selector.modify(self._connections[rank].sock, events, rank)


class Hub:
    """The hub's part. Owns the ends that have not been sent until :meth:`close`."""

    def __init__(self, members: Mapping[int, PeerConnection]) -> None:
        """``members``: the connections to the other ranks of this host; they have to be ready."""
        self._members = {rank: _Recipient(members[rank]) for rank in sorted(members)}
        self._connections = dict(members)
        self._changed: set[int] = set()
        self._blocks = self._pairs_of_blocks()
        self._under_way = 0
        self.done = False
        self._fill()

    @property
    def awaited(self) -> list[int]:
        """See :class:`Endpoint`."""
        return [rank for rank, member in self._members.items() if member.owes_answer]

    def _pairs_of_blocks(self) -> Iterator[tuple[list[int], list[int]]]:
        ranks = list(self._members)
        blocks = [ranks[i : i + _BLOCK] for i in range(0, len(ranks), _BLOCK)]
        for i, one in enumerate(blocks):
            for other in blocks[i:]:
                yield one, other

    def _fill(self) -> None:
        """Make and queue pairs until :data:`_UNDER_WAY` descriptors are in transit."""
        while self._under_way <= _UNDER_WAY:
            blocks = next(self._blocks, None)
            if blocks is None:
                self.done = self._under_way == 0
                return
            self._make_pairs(*blocks)

    def _make_pairs(self, one: list[int], other: list[int]) -> None:
        made: dict[int, list[tuple[int, socket.socket]]] = {rank: [] for rank in one + other}
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        try:
            for a in one:
                for b in other:
                    if a < b:
                        ends = socket.socketpair(socket.AF_UNIX, kind)
                        made[a].append((b, ends[0]))
                        made[b].append((a, ends[1]))
        finally:  # queued ends are closed with this object
            for rank, ends_of_rank in made.items():
                if ends_of_rank:
                    self._queue(rank, ends_of_rank)

    def _queue(self, to: int, ends: list[tuple[int, socket.socket]]) -> None:
        member = self._members[to]
        ranks = [rank for rank, _ in ends]
        payload = _HEADER.pack(_MAGIC, len(ranks)) + struct.pack(f"!{len(ranks)}I", *ranks)
        fds: list[int] = []
        for rank, end in ends:
            fds += end.fileno(), *self._members[rank].connection.fds
        member.outbox.append(_Message(member.channel.seal(payload), fds, [end for _, end in ends]))
        self._under_way += len(fds)
        self._changed.add(to)

    def connections(self) -> Mapping[int, PeerConnection]:
        """See :class:`Endpoint`."""
        return self._connections

    def take_changes(self) -> Mapping[int, bool]:
        """See :class:`Endpoint`."""
        changed, self._changed = self._changed, set()
        return {rank: bool(self._members[rank].outbox) for rank in changed}

    def advance(self, rank: int) -> None:
        """See :class:`Endpoint`."""
        member = self._members[rank]
        member.flush()
        self._changed.add(rank)
        while member.unanswered and member.receive_answer():
            self._under_way -= member.unanswered.popleft()
        self._fill()

    def close(self) -> None:
        """Close the ends that have not been sent. Idempotent."""
        for member in self._members.values():
            for message in member.outbox:
                message.close()
            member.outbox.clear()


class _Message:
    """A sealed message, the descriptors that it carries, and the sockets to close when it has been sent."""

    def __init__(self, data: bytes, fds: list[int], ends: list[socket.socket]) -> None:
        self.data = data
        self.fds = fds
        self.ends = ends
        self.count = len(fds)

    def send(self, sock: socket.socket) -> bool:
        """Send as much as possible. Returns whether nothing is left. Errors: OSError, BlockingIOError among them."""
        if self.fds:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self.fds))
            sent = sock.sendmsg([self.data], [rights])
            self.close()
        else:
            sent = sock.send(self.data)
        self.data = self.data[sent:]
        return not self.data

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.ends, self.fds = [], []


class _Recipient:
    """A rank that is connected to the hub, as the hub sees it."""

    def __init__(self, connection: PeerConnection) -> None:
        self.connection = connection
        self.channel = connection.channel
        self.outbox: deque[_Message] = deque()
        self.unanswered: deque[int] = deque()  # descriptors of the messages that are sent
        self._inbox = bytearray()

    @property
    def owes_answer(self) -> bool:
        """Whether the rank has not answered all messages."""
        return bool(self.outbox or self.unanswered)

    def flush(self) -> None:
        try:
            while self.outbox:
                message = self.outbox[0]
                if not message.send(self.connection.sock):
                    return
                self.outbox.popleft()
                self.unanswered.append(message.count)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            # Too many descriptors of this user are in transit, in this program or in others.
            time.sleep(_PAUSE)

    def receive_answer(self) -> bool:
        """Whether the answer to the oldest message has arrived."""
        try:
            if not _read(self.connection.sock, self._inbox, self.channel, len(_ANSWER)):
                return False
        except BlockingIOError:
            return False
        if self.channel.take(self._inbox, len(_ANSWER)) != _ANSWER:
            raise ProtocolError(f"{self.connection.label} sent no valid answer")
        return True


class Member:
    """The part of a rank that is not the hub. Owns the received descriptors until they are taken from ``received``."""

    def __init__(self, hub: int, connection: PeerConnection, others: Collection[int]) -> None:
        """``hub``: the rank of the hub; ``connection``: the connection to it, which is ready; ``others``: the other
        ranks of this host."""
        self._hub = hub
        self._connection = connection
        self._missing = set(others)
        self._inbox = bytearray()
        self._fds: list[int] = []  # descriptors of the message that is being received
        self._outbox = b""
        self.received: dict[int, Descriptors] = {}
        """The descriptors received so far, by the rank that they connect to."""

    @property
    def done(self) -> bool:
        """Whether this rank is connected to all others of the host."""
        return not self._missing and not self._outbox

    @property
    def awaited(self) -> list[int]:
        """See :class:`Endpoint`."""
        return [] if self.done else [self._hub]

    def connections(self) -> Mapping[int, PeerConnection]:
        """See :class:`Endpoint`."""
        return {self._hub: self._connection}

    def take_changes(self) -> Mapping[int, bool]:
        """See :class:`Endpoint`."""
        return {self._hub: bool(self._outbox)}

    def advance(self, rank: int) -> None:
        """See :class:`Endpoint`."""
        try:
            while not self.done:
                while self._outbox:
                    self._outbox = self._outbox[self._connection.sock.send(self._outbox) :]
                if self._missing:
                    self._receive()
        except BlockingIOError:
            return

    def _receive(self) -> None:
        connection, limit = self._connection, _HEADER.size + 4 * _MOST_RANKS
        while missing := connection.channel.missing(self._inbox, limit):
            # Never read beyond this message, because descriptors arrive together with the bytes of their message.
            data, fds = _receive_with_fds(connection.sock, missing)
            self._fds += fds
            self._inbox += data
        payload = connection.channel.take(self._inbox, limit)
        assert payload is not None
        self._take(payload)
        self._outbox += connection.channel.seal(_ANSWER)

    def _take(self, payload: bytes) -> None:
        ranks = _ranks(payload)
        if not self._missing.issuperset(ranks) or len(set(ranks)) < len(ranks):
            raise ProtocolError(f"{self._connection.label} sent connections to unexpected ranks")
        if len(self._fds) != _PER_RANK * len(ranks):
            raise ProtocolError(
                f"{self._connection.label} sent {len(self._fds)} descriptors for {len(ranks)} ranks"
            )
        fds, self._fds = self._fds, []
        for i, rank in enumerate(ranks):
            stream, segment, doorbell = fds[_PER_RANK * i : _PER_RANK * (i + 1)]
            self.received[rank] = stream, segment, doorbell
        self._missing.difference_update(ranks)

    def close(self) -> None:
        """Close the received descriptors. Idempotent."""
        for fds in (self._fds, *self.received.values()):
            for fd in fds:
                os.close(fd)
        self._fds, self.received = [], {}


def _ranks(payload: bytes) -> tuple[int, ...]:
    """The ranks of a message of the hub."""
    if len(payload) < _HEADER.size:
        raise ProtocolError("the hub's message is too short")
    magic, count = _HEADER.unpack_from(payload)
    if magic != _MAGIC or len(payload) != _HEADER.size + 4 * count:
        raise ProtocolError("the hub's message is malformed")
    return struct.unpack_from(f"!{count}I", payload, _HEADER.size)


def _read(sock: socket.socket, inbox: bytearray, channel: MessageChannel, limit: int) -> bool:
    """Read the rest of a message of at most ``limit`` bytes; returns whether it is complete."""
    while missing := channel.missing(inbox, limit):
        data = sock.recv(missing)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        inbox += data
    return True


def _receive_with_fds(sock: socket.socket, count: int) -> tuple[bytes, array.array[int]]:
    """Read up to ``count`` bytes and the descriptors that come with them."""
    data, ancillary, flags, _ = sock.recvmsg(count, _RIGHTS_SPACE, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        # The kernel drops descriptors that exceed this process's limit.
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not data:
        raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
    return data, fds
