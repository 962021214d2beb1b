"""Makes connections to ranks on other hosts while the job runs, when the core first needs them.

The core asks by writing the number of a rank to a socket. A thread connects to the rank, or accepts the connection that
the rank makes, with the authentication and encryption of the first connections, and hands the descriptors to the core.
The thread sleeps while nothing happens."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Protocol

from horoplug.rendezvous.connections.on_demand_connector import OnDemandConnector
from horoplug.rendezvous.connections.peer_connection import Identity, PeerConnection
from horoplug.rendezvous.connections.sockets import Address
from horoplug.rendezvous.network.fork import close_in_children

_REQUEST = struct.Struct("=I")
_READ_BYTES = 1024 * _REQUEST.size

_log = logging.getLogger("horoplug")


class TakesConnections(Protocol):
    """The engine, as the service sees it. The methods are called in the service's thread."""

    def add_connection(self, rank: int, fds: list[int], keys: bytes) -> None:
        """Take the connected descriptors to a rank, by lane, and the encryption keys of all lanes, empty without
        encryption. The descriptors are owned by the engine from the call on, also if it fails or has shut down."""

    def fail_connection(self, rank: int, reason: str) -> None:
        """The rank cannot be connected to, which ends the job. ``reason``: one line that calls the rank "it"."""


class ConnectionService:
    """The thread, the requests, the listener, and the connections that are not handed over yet."""

    def __init__(
        self,
        listener: socket.socket,
        me: Identity,
        addresses: Mapping[int, Address],
        streams: int,
        data_timeout: float,
    ) -> None:
        """Take ownership of ``listener``, also if this fails.

        ``addresses``: where each rank on another host listens that is not connected yet; the other parameters are those
        of :class:`.OnDemandConnector`. Errors: OSError if this process has no descriptors left."""
        self._engine: TakesConnections | None = None
        self._thread: threading.Thread | None = None
        self._closing = self._closed = False
        self._handed_over: list[tuple[int, os.stat_result]] = []
        self._fds: list[int] = []  # both ends of the requests, and an eventfd that ends the thread
        self.encrypts = me.encrypt
        """Whether the connections are encrypted."""
        with contextlib.ExitStack() as stack:
            stack.callback(listener.close)
            self._connector = OnDemandConnector(
                me, addresses, streams, data_timeout, self._connected, self._failed
            )
            stack.callback(self._close_all)
            # Not a pipe: writing to one that is closed would send SIGPIPE to the program.
            for end in socket.socketpair(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK):
                self._fds.append(end.detach())
            self._fds.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            self._requests, self._request_fd, self._wake = self._fds
            self._connector.watch(self._requests, self._read_requests)
            self._connector.watch(self._wake, self._stop)
            self._connector.listen(listener, data_timeout)
            stack.pop_all()
        close_in_children(self)

    def take_request_fd(self) -> int:
        """Hand over the end to which the core writes, nonblocking. A request is the number of a rank as a
        native uint32. When the core closes its end, the thread ends."""
        fd = self._request_fd
        self._fds.remove(fd)
        self._handed_over.append((fd, os.fstat(fd)))
        return fd

    def start(self, engine: TakesConnections) -> None:
        """Start the thread. Requests and connections of other ranks that came earlier have waited."""
        self._engine = engine
        self._thread = threading.Thread(target=self._run, name="horoplug-connections", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close everything that was not handed over. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._thread = self._engine = None
        self._handed_over = []
        self._close_all()

    def forget(self) -> None:
        """Close the copies in a forked child, also those of connections that were handed over. The thread does not
        exist there."""
        self._closed = True
        self._thread = self._engine = None
        self._close_all()
        for fd, stat in self._handed_over:
            with contextlib.suppress(OSError):  # the engine has closed it
                if os.path.samestat(os.fstat(fd), stat):
                    os.close(fd)
        self._handed_over = []

    def _close_all(self) -> None:
        self._connector.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._connector.run_once()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            _log.exception("no further connections between ranks can be made")
            self._fail_all(f"the thread that makes connections has failed: {reason}")

    def _read_requests(self) -> None:
        ranks = self._requested_ranks()
        if ranks is None:  # the core has closed its end
            self._closing = True
        for rank in ranks or ():
            self._connector.request(rank)

    def _requested_ranks(self) -> list[int] | None:
        """The ranks that were requested since the last call; None at the end."""
        try:
            data = os.read(self._requests, _READ_BYTES)
        except BlockingIOError:
            return []
        return [rank for (rank,) in _REQUEST.iter_unpack(data)] if data else None

    def _stop(self) -> None:
        self._closing = True

    def _connected(self, rank: int, lanes: list[PeerConnection]) -> None:
        assert self._engine is not None
        keys = b"".join(lane.data_keys() for lane in lanes)
        for lane in lanes:
            self._handed_over.append((lane.sock.fileno(), os.fstat(lane.sock.fileno())))
        self._engine.add_connection(rank, [lane.detach()[0] for lane in lanes], keys)

    def _failed(self, rank: int, reason: str) -> None:
        assert self._engine is not None
        self._engine.fail_connection(rank, " ".join(reason.split()))

    def _fail_all(self, reason: str) -> None:
        """Fail the requests under way and all later ones, until the service is closed."""
        requested: list[int] | None = self._connector.requested
        self._connector.close()
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while requested is not None and not self._closing:
            for rank in requested:
                self._failed(rank, f"it cannot be connected to: {reason}")
            self._closing = any(fd == self._wake for fd, _ in poll.poll())
            requested = self._requested_ranks()
