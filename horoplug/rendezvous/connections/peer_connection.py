"""One connection between two ranks while it is being made: authentication, then an exchange of hellos.

Two ranks on different hosts may have several connections, *lanes*, numbered from 0. A hello has 40 bytes: magic,
version, kind, refusal, lane, rank, size, generation, job. Between ranks on one host it carries two descriptors: the
sender's memfd and eventfd. The rank that listens checks first and answers with its own hello, or with a refusal that
says why. Sockets never block; whoever runs the event loop calls :meth:`PeerConnection.advance` when one is
ready."""

from __future__ import annotations

import array
import contextlib
import enum
import errno
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable

from horoplug.base.errors import AuthenticationError, ProtocolError
from horoplug.rendezvous.network.auth import FRAME_BYTES, Handshake, Role

_HELLO = struct.Struct("!4sBBBBIIQ16s")
_MAGIC = b"HPme"
_VERSION = 2
_FDS = 2  # the memfd and the eventfd
_FD_SPACE = socket.CMSG_SPACE(8 * 4)  # room for more, so that too many are noticed and closed

_OFFER, _REFUSAL = 1, 2


class Refusal(enum.IntEnum):
    """Why the listening rank does not want a connection."""

    GENERATION = 1
    SIZE = 2
    RANK = 3
    DUPLICATE = 4
    LANE = 5


_REFUSAL_TEXT = {
    Refusal.GENERATION: "it is in another generation of the job (one of the two initialised more often)",
    Refusal.SIZE: "it believes the job to have another size",
    Refusal.RANK: "it does not expect a connection from this rank",
    Refusal.DUPLICATE: "this rank is connected to it already",
    Refusal.LANE: "it expects fewer connections (HOROPLUG_NUM_STREAMS)",
}


class Stage(enum.Enum):
    """How far a connection has come."""

    CONNECTING = 1
    AUTHENTICATING = 2
    GREETING = 3
    READY = 4


class Identity:
    """What a rank says about itself on every connection, and the descriptors that it hands out."""

    def __init__(self, rank: int, size: int, generation: int, secret: bytes) -> None:
        self.rank = rank
        self.size = size
        self.generation = generation
        self.secret = secret
        self.job = hmac.new(secret, b"horoplug job", hashlib.sha256).digest()[:16]
        self.fds: tuple[int, int] | None = (
            None  # memfd and eventfd, once there is a peer on this host
        )

    def hello(self, kind: int = _OFFER, refusal: int = 0, lane: int = 0) -> bytes:
        """The 40 bytes."""
        return _HELLO.pack(
            _MAGIC, _VERSION, kind, refusal, lane, self.rank, self.size, self.generation, self.job
        )


def mesh_context(listener: int) -> bytes:
    """What authentication on a rank's listener is bound to."""
    return f"mesh listener {listener}".encode()


class PeerConnection:
    """One connection in the making. Owns its socket and the descriptors it receives, until :meth:`detach`."""

    def __init__(
        self,
        sock: socket.socket,
        me: Identity,
        *,
        target: int | None,
        deadline: float,
        admit: Callable[[int, int, bool], Refusal | None],
        label: str,
        lane: int = 0,
    ) -> None:
        """``target`` and ``lane``: the rank connected to, None for an accepted connection, and which of the connections
        to it this is. ``admit`` judges what an accepted connection turns out to be; it is told the rank, the lane and
        whether the connection is local."""
        self.sock = sock
        self.lane = lane
        self.target = target
        self.rank = target
        self.deadline = deadline
        self.label = label
        self.local = sock.family == socket.AF_UNIX
        self.fds: list[int] = []
        self.stage = Stage.CONNECTING if target is not None else Stage.AUTHENTICATING
        self._me = me
        self._admit = admit
        self._inbox = b""
        self._outbox = b""
        self._fds_out: tuple[int, ...] = ()  # go with the first byte of the outbox
        role = Role.SERVER if target is None else Role.CLIENT
        context = mesh_context(me.rank if target is None else target)
        self._handshake = Handshake(me.secret, role, context, label)

    def connected(self) -> None:
        """The outgoing connection has been established."""
        self.stage = Stage.AUTHENTICATING
        self._outbox += self._handshake.start()

    @property
    def wants_write(self) -> bool:
        """Whether the event loop is to wait for room to send, too."""
        return self.stage is Stage.CONNECTING or bool(self._outbox)

    def advance(self) -> None:
        """Send and receive what is possible without waiting.

        Errors: AuthenticationError, ProtocolError or OSError; the link is then to be closed."""
        if self.stage is Stage.CONNECTING:
            error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            self.connected()
        try:
            while True:
                self._flush()
                if self.stage is Stage.READY or not self._receive():
                    return
        except BlockingIOError:
            return
        except AuthenticationError:
            self._last(self._handshake.farewell)
            raise

    def _flush(self) -> None:
        while self._outbox:
            if self._fds_out:
                rights = array.array("i", self._fds_out)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                sent = self.sock.sendmsg([self._outbox], ancillary)
                self._fds_out = ()
            else:
                sent = self.sock.send(self._outbox)
            self._outbox = self._outbox[sent:]

    def _receive(self) -> bool:
        """Read and handle one frame; False once nothing more is expected."""
        greeting = self.stage is Stage.GREETING
        size = _HELLO.size if greeting else FRAME_BYTES
        while len(self._inbox) < size:
            # Never more than this frame: a descriptor that came with the next one would be lost.
            piece = self._read(size - len(self._inbox), with_fds=greeting and self.local)
            if not piece:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            self._inbox += piece
        frame, self._inbox = self._inbox, b""
        if greeting:
            self._greeted(frame)
        else:
            self._outbox += self._handshake.feed(frame)
            if self._handshake.done:
                self.stage = Stage.GREETING
                if self.target is not None:
                    # The last proof is to be on its way first: it must not be read with the
                    # descriptors of the hello.
                    self._flush()
                    self._offer()
        return True

    def _read(self, count: int, with_fds: bool) -> bytes:
        if not with_fds:
            return self.sock.recv(count)
        data, ancillary, flags, _ = self.sock.recvmsg(count, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
                self.fds += fds
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(f"{self.label} sent too many descriptors")
        return data

    def _offer(self) -> None:
        self._outbox += self._me.hello(lane=self.lane)
        if self.local and self._me.fds is not None:
            self._fds_out = self._me.fds

    def _greeted(self, frame: bytes) -> None:
        magic, version, kind, refusal, lane, rank, size, generation, job = _HELLO.unpack(frame)
        if magic != _MAGIC or version != _VERSION or kind not in (_OFFER, _REFUSAL):
            raise ProtocolError(f"{self.label} sent no valid hello")
        if kind == _REFUSAL and self.target is not None:
            text = _REFUSAL_TEXT.get(refusal, "for an unknown reason")
            raise ProtocolError(f"{self.label} refused the connection: {text}")
        if self.target is None:
            self._judge(rank, lane, size, generation)
        elif (rank, lane, size, generation) != (
            self.target,
            self.lane,
            self._me.size,
            self._me.generation,
        ):
            raise ProtocolError(
                f"{self.label} says it is rank {rank} of {size} in generation {generation}, lane {lane}"
            )
        if not hmac.compare_digest(job, self._me.job):
            raise ProtocolError(f"{self.label} belongs to another job")
        if len(self.fds) != (_FDS if self.local else 0):
            raise ProtocolError(f"{self.label} sent {len(self.fds)} descriptors, not {_FDS}")
        self.lane = lane
        if self.target is None:
            self._offer()
            self._flush_or_fail()
        self.rank = rank
        self.stage = Stage.READY

    def _judge(self, rank: int, lane: int, size: int, generation: int) -> None:
        refusal: Refusal | None
        if generation != self._me.generation:
            refusal = Refusal.GENERATION
        elif size != self._me.size:
            refusal = Refusal.SIZE
        else:
            refusal = self._admit(rank, lane, self.local)
        if refusal is not None:
            self._last(self._me.hello(_REFUSAL, refusal))
            raise ProtocolError(
                f"{self.label} (rank {rank} of {size}, generation {generation}, lane {lane}) was refused: "
                f"{refusal.name.lower()}"
            )

    def _flush_or_fail(self) -> None:
        """Send the last 40 bytes of a connection that carried a few hundred: there is always room."""
        try:
            self._flush()
        except BlockingIOError:
            raise ProtocolError(f"{self.label} does not read what it is sent") from None

    def _last(self, data: bytes) -> None:
        """Send something as a last word, if possible."""
        with contextlib.suppress(OSError):
            self.sock.send(data)

    def detach(self) -> tuple[int, int, int]:
        """(stream, segment, doorbell) descriptors, now the caller's; -1 for those that a remote peer has not."""
        segment, doorbell = self.fds if self.fds else (-1, -1)
        self.fds = []
        return self.sock.detach(), segment, doorbell

    def close(self) -> None:
        """Close the socket and what was received. Idempotent."""
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []
