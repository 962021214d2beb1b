"""One connection between two ranks while it is being established: authentication, then an exchange of hellos.

Two ranks on different hosts may have several connections (*lanes*), numbered from 0. A hello is an authenticated
message (network/messages.py) of 40 bytes: magic, version, kind, refusal, lane, rank, size, generation, job. Between
ranks on one host it carries two descriptors: the sender's memfd and eventfd. The listening rank checks the hello first
and answers with its own hello, or with a refusal and its reason. Sockets are nonblocking; the event loop calls
:meth:`PeerConnection.advance` when one is ready."""

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
from horoplug.rendezvous.network.auth import FRAME_BYTES, Encryption, Handshake, Role
from horoplug.rendezvous.network.messages import MessageChannel

_HELLO = struct.Struct("!4sBBBBIIQ16s")
_MAGIC = b"HPme"
_VERSION = 3  # 2: every two ranks of a host made a connection of their own
_FDS = 2  # the memfd and the eventfd
# Room for more descriptors than _FDS, so that surplus ones are received and closed.
_FD_SPACE = socket.CMSG_SPACE(8 * 4)

_OFFER, _REFUSAL = 1, 2


class Refusal(enum.IntEnum):
    """Why the listening rank refuses a connection."""

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
    """The values that a rank sends on every connection, and the descriptors that it sends to peers on its host."""

    def __init__(
        self, rank: int, size: int, generation: int, secret: bytes, encrypt: bool = False
    ) -> None:
        """``encrypt``: whether connections to other hosts are encrypted."""
        self.encrypt = encrypt
        self.rank = rank
        self.size = size
        self.generation = generation
        self.secret = secret
        self.job = hmac.new(secret, b"horoplug job", hashlib.sha256).digest()[:16]
        self.fds: tuple[int, int] | None = None
        """memfd and eventfd; None until this rank knows that a peer is on its host."""

    def hello(self, kind: int = _OFFER, refusal: int = 0, lane: int = 0) -> bytes:
        """The payload of a hello or, with ``refusal``, of a refusal."""
        return _HELLO.pack(
            _MAGIC, _VERSION, kind, refusal, lane, self.rank, self.size, self.generation, self.job
        )


def listener_context(listener: int) -> bytes:
    """The authentication context of a rank's listener, so that a proof for one listener is invalid for another."""
    return f"mesh listener {listener}".encode()


class PeerConnection:
    """A connection that is being established. Owns its socket and the received descriptors until :meth:`detach`."""

    def __init__(
        self,
        sock: socket.socket,
        me: Identity,
        *,
        target: int | None,
        admit: Callable[[int, int, bool], Refusal | None],
        label: str,
        lane: int = 0,
    ) -> None:
        """``target``: the rank that this connection is made to; None for an accepted one. ``lane``: the number of the
        connection among those to ``target``. ``admit(rank, lane, is_local)``: why an accepted connection
        has to be refused; None: it is accepted. ``label``: names the peer in messages."""
        self.sock = sock
        self.lane = lane
        self.target = target
        self.rank = target
        self.label = label
        self.local = sock.family == socket.AF_UNIX
        self.fds: list[int] = []
        self.refusal = 0
        """The :class:`Refusal` with which one end has refused the other; 0 if none has."""
        self.stage = Stage.CONNECTING if target is not None else Stage.AUTHENTICATING
        self._me = me
        self._admit = admit
        self._inbox = b""
        self._outbox = b""
        self._fds_out: tuple[int, ...] = ()  # sent with the first byte of the outbox
        role = Role.SERVER if target is None else Role.CLIENT
        context = listener_context(me.rank if target is None else target)
        # Unix sockets do not leave the host.
        encryption = Encryption.ON if me.encrypt and not self.local else Encryption.OFF
        self._handshake = Handshake(me.secret, role, context, label, encryption)
        self._channel: MessageChannel | None = None  # once authenticated

    def connected(self) -> None:
        """The peer's kernel has accepted the outgoing connection: start to authenticate."""
        self.stage = Stage.AUTHENTICATING
        self._outbox += self._handshake.start()

    @property
    def channel(self) -> MessageChannel:
        """The channel that authenticates the messages after the hellos."""
        assert self._channel is not None
        return self._channel

    @property
    def wants_write(self) -> bool:
        """Whether the event loop also has to wait until the socket is writable."""
        return self.stage is Stage.CONNECTING or bool(self._outbox)

    def advance(self) -> None:
        """Send and receive what is possible without blocking.

        Errors: AuthenticationError, ProtocolError or OSError; the caller then has to close the connection."""
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
            self._send_last(self._handshake.farewell)
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
        size = FRAME_BYTES
        if greeting:
            assert self._channel is not None
            size = _HELLO.size + self._channel.overhead
        while len(self._inbox) < size:
            # Never read beyond this frame: descriptors that come with the next one would be lost.
            data = self._read(size - len(self._inbox), with_fds=greeting and self.local)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            self._inbox += data
        frame, self._inbox = self._inbox, b""
        if greeting:
            assert self._channel is not None
            hello = self._channel.take(bytearray(frame), _HELLO.size)
            if hello is None or len(hello) != _HELLO.size:
                raise ProtocolError(f"{self.label} sent no valid hello")
            self._on_hello(hello)
        else:
            self._outbox += self._handshake.feed(frame)
            if self._handshake.done:
                self._channel = self._handshake.channel()
                self.stage = Stage.GREETING
                if self.target is not None:
                    # Send the last proof on its own: the peer must not read it together with the
                    # hello, which carries descriptors.
                    self._flush()
                    self._send_hello()
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

    def _send_hello(self) -> None:
        assert self._channel is not None
        self._outbox += self._channel.seal(self._me.hello(lane=self.lane))
        if self.local and self._me.fds is not None:
            self._fds_out = self._me.fds

    def _on_hello(self, frame: bytes) -> None:
        magic, version, kind, refusal, lane, rank, size, generation, job = _HELLO.unpack(frame)
        if magic != _MAGIC or version != _VERSION or kind not in (_OFFER, _REFUSAL):
            raise ProtocolError(f"{self.label} sent no valid hello")
        if kind == _REFUSAL and self.target is not None:
            self.refusal = refusal
            text = _REFUSAL_TEXT.get(refusal, "for an unknown reason")
            raise ProtocolError(f"{self.label} refused the connection: {text}")
        if self.target is None:
            self._check_admission(rank, lane, size, generation)
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
            self._send_hello()
            self._flush_or_fail()
        self.rank = rank
        self.stage = Stage.READY

    def _check_admission(self, rank: int, lane: int, size: int, generation: int) -> None:
        refusal: Refusal | None
        if generation != self._me.generation:
            refusal = Refusal.GENERATION
        elif size != self._me.size:
            refusal = Refusal.SIZE
        else:
            refusal = self._admit(rank, lane, self.local)
        if refusal is not None:
            assert self._channel is not None
            self.refusal = refusal
            self._send_last(self._channel.seal(self._me.hello(_REFUSAL, refusal)))
            raise ProtocolError(
                f"{self.label} (rank {rank} of {size}, generation {generation}, lane {lane}) was refused: "
                f"{refusal.name.lower()}"
            )

    def _flush_or_fail(self) -> None:
        """Send the last message without waiting. The buffer of the connection has room for it, because the connection
        has carried only a few hundred bytes."""
        try:
            self._flush()
        except BlockingIOError:
            raise ProtocolError(f"{self.label} does not read what it is sent") from None

    def _send_last(self, data: bytes) -> None:
        """Send a final message before the connection is closed; errors do not matter any more."""
        with contextlib.suppress(OSError):
            self.sock.send(data)

    def data_keys(self) -> bytes:
        """See :meth:`.Handshake.data_keys`. The connection must be ready."""
        return self._handshake.data_keys()

    def detach(self) -> tuple[int, int, int]:
        """Hand over the (stream, segment, doorbell) descriptors; the last two are -1 for a peer on another host."""
        segment, doorbell = self.fds if self.fds else (-1, -1)
        self.fds = []
        return self.sock.detach(), segment, doorbell

    def close(self) -> None:
        """Close the socket and the received descriptors. Idempotent."""
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []
