"""Makes the connections of one rank while a job starts: it connects to the ranks below it and accepts connections from
the ranks above it.

If a connection that this rank makes breaks, the rank retries for a moment, since the peer may have been too busy, and
then raises an error that names the peer. If a process that has not proved to know the secret answers in the peer's
place, the rank retries until its deadline."""

from __future__ import annotations

import selectors
import socket
import time

from horoplug.base.errors import AuthenticationError, PeerLostError, ProtocolError
from horoplug.rendezvous.connections.loop import REJECTED_PAUSE, RETRY_PAUSE, ConnectionLoop, Key
from horoplug.rendezvous.connections.peer_connection import Identity, PeerConnection, Refusal
from horoplug.rendezvous.connections.sockets import SPARE_INCOMING, Address
from horoplug.rendezvous.store.client import StoreClient

_RETRY_SECONDS = 1.0


class Connector(ConnectionLoop):
    """Makes the connections of one rank. Owns their sockets until :meth:`detach`."""

    def __init__(self, me: Identity, deadline: float) -> None:
        super().__init__(me)
        self._deadline = deadline
        self._streams = 1  # number of lanes to each rank on another host
        self._expected = 0  # number of connections
        self._local: set[int] = set()
        self._failing: dict[Key, float] = {}  # time of the first failure
        self.rejections: dict[Key, AuthenticationError] = {}
        """The last failures to authenticate lower ranks that are not connected yet."""
        self._store_watched = False

    def connect_to(self, addresses: dict[int, Address], local: set[int], streams: int = 1) -> None:
        """Start to connect to the lower ones of some ranks, and accept the higher ones from now on.

        ``addresses``: where each of these ranks listens; ``local``: the ranks on this host; ``streams``: number of
        connections to each rank on another host."""
        self._addresses = addresses
        self._local = local
        self._streams = streams
        self._expected = sum(map(self._lane_count, addresses))
        for rank in sorted(addresses):
            if rank < self._me.rank:
                for lane in range(self._lane_count(rank)):
                    self._dial((rank, lane))

    def _lane_count(self, rank: int) -> int:
        return 1 if rank in self._local else self._streams

    def _is_rank_connected(self, rank: int) -> bool:
        return all((rank, lane) in self._ready for lane in range(self._lane_count(rank)))

    @property
    def missing(self) -> list[int]:
        """Ranks that are not connected yet."""
        return sorted(rank for rank in self._addresses if not self._is_rank_connected(rank))

    @property
    def done(self) -> bool:
        """Whether all ranks of :meth:`connect_to` are connected."""
        return len(self._ready) == self._expected

    # ---- the event loop ----------------------------------------------------------------------------------------------

    def run_once(self, store: StoreClient) -> None:
        """Wait for events on the connections or the store, and handle those on the connections. The caller enforces
        the deadline for all connections.

        Errors: PeerLostError or ProtocolError about a rank that this one connects to."""
        if not self._store_watched:
            self._store_watched = True
            self._selector.register(store, selectors.EVENT_READ)
        self._run_once(min(self._deadline, self._next_due()))
        for key in self._take_due():
            self._dial(key)

    @property
    def _most_incoming(self) -> int:
        return self._me.size * self._streams + SPARE_INCOMING

    def _admit(self, rank: int, lane: int, local: bool) -> Refusal | None:
        if rank <= self._me.rank or rank not in self._addresses or local != (rank in self._local):
            return Refusal.RANK
        if lane >= self._lane_count(rank):
            return Refusal.LANE
        return Refusal.DUPLICATE if (rank, lane) in self._ready else None

    def _complete(self, connection: PeerConnection) -> None:
        self._forget(connection)
        assert connection.rank is not None
        self._ready[connection.rank, connection.lane] = connection
        self._failing.pop((connection.rank, connection.lane), None)
        self.rejections.pop((connection.rank, connection.lane), None)

    def _rejected(self, key: Key, error: AuthenticationError) -> None:
        """Try again until the deadline."""
        self._complain(str(error))
        self.rejections[key] = error
        self._retries[key] = time.monotonic() + REJECTED_PAUSE

    def _failed(self, key: Key, error: OSError) -> None:
        """Retry for a moment, then raise PeerLostError."""
        now, rank = time.monotonic(), key[0]
        if now - self._failing.setdefault(key, now) > _RETRY_SECONDS:
            raise PeerLostError(
                rank,
                f"rank {rank} cannot be connected to: {error.strerror}; it has ended or failed",
            )
        self._retries[key] = now + RETRY_PAUSE

    def _violated(self, connection: PeerConnection, error: ProtocolError) -> None:
        if connection.target is not None:
            raise error
        self._complain(str(error))

    # ---- the end -----------------------------------------------------------------------------------------------------

    def stop_listening(self, keep_tcp: bool = False) -> None:
        """Close the listeners and all connections that are not ready.

        ``keep_tcp``: leave the TCP listener open, for :meth:`take_listener`. Connections to it wait."""
        for listener in self._listeners:
            self._selector.unregister(listener)
        kept = [each for each in self._listeners if keep_tcp and each.family != socket.AF_UNIX]
        for listener in self._listeners:
            if listener not in kept:
                listener.close()
        self._listeners = kept
        for connection in list(self._pending):
            self._drop(connection)

    def take_listener(self) -> socket.socket:
        """Hand over the TCP listener that :meth:`stop_listening` has left open."""
        return self._listeners.pop()

    def stream(self, rank: int) -> socket.socket:
        """The socket of the first connection to a rank. It stays owned by this object."""
        return self._ready[rank, 0].sock

    def local_connections(self) -> dict[int, PeerConnection]:
        """The connections to ranks on this host, once they are ready. They stay owned by this object."""
        return {rank: self._ready[rank, 0] for rank in self._addresses if rank in self._local}

    def data_keys(self, rank: int) -> bytes:
        """The concatenated keys of all connections to a rank, by lane, which encrypt what the core sends and receives;
        empty if the connections are not encrypted."""
        return b"".join(
            self._ready[rank, lane].data_keys() for lane in range(self._lane_count(rank))
        )

    def detach(self) -> dict[Key, tuple[int, int, int]]:
        """Hand over the (stream, segment, doorbell) descriptors of all connections, by rank and lane."""
        detached = {key: connection.detach() for key, connection in self._ready.items()}
        self._ready.clear()
        return detached
