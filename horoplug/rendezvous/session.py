"""A process's way to the other ranks, from its configuration: the store's connection, and a mesh whenever it is asked.

Keep one Rendezvous from the first ``init()`` until the process ends, across shutdowns: the connection is how the others
learn that this rank has died, and in rank-0 mode rank 0 serves everybody."""

from __future__ import annotations

from horoplug.base.config import Config
from horoplug.mpi import thread as mpi_thread
from horoplug.mpi.measure import Costs
from horoplug.mpi.transport import Carrier, Place
from horoplug.rendezvous.connections.peers import PeerConnections, connect_peers
from horoplug.rendezvous.network.topology import host_key, interface_address
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer


class Rendezvous:
    """The store's client of this process, and its server if this is where it runs. A context manager."""

    def __init__(self, config: Config, server: StoreServer | None = None) -> None:
        """Connect to the store, within ``config.start_timeout``; a job of one rank connects to nothing. ``server``: one
        that this process serves already, and that is closed with this.

        Errors: ValueError if variables are missing, else RendezvousError or AuthenticationError."""
        self._config = config
        self._server = server
        self._client: StoreClient | None = None
        self._costs_of_mpi: dict[Place, Costs] = {}
        if config.size == 1:
            return
        if config.rendezvous_addr is None or config.rendezvous_port is None:
            raise ValueError(
                f"HOROVOD_SIZE={config.size} needs HOROVOD_GLOO_RENDEZVOUS_ADDR and "
                "HOROVOD_GLOO_RENDEZVOUS_PORT; start the job with horovodrun"
            )
        if config.secret_key is None:
            raise ValueError(
                f"HOROVOD_SIZE={config.size} needs HOROPLUG_SECRET_KEY, 32 bytes as hex or base64, "
                "the same on all ranks; start the job with horovodrun"
            )
        if config.gloo_iface:
            interface_address(config.gloo_iface)  # a wrong name is best found before others wait
        address, port = config.rendezvous_addr, config.rendezvous_port
        if config.rendezvous_server == "rank0" and config.rank == 0:
            try:
                self._server = StoreServer(config.secret_key, address, port)
            except OSError as error:
                raise ValueError(
                    f"rank 0 cannot serve the rendezvous at {address}:{port}: {error.strerror}"
                ) from None
        try:
            self._client = StoreClient.connect(
                address, port, config.secret_key, config.start_timeout
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self, generation: int, ranks: tuple[int, ...] | None = None) -> PeerConnections:
        """Connect with all ranks, or with ``ranks`` alone, which become 0, 1 … in their order. ``generation`` counts
        from 0, one more for every call with them, the same on all of them.

        Errors: those of :func:`horoplug.rendezvous.connections.peers.connect_peers`."""
        config = self._config
        return connect_peers(
            rank=config.rank if ranks is None else ranks.index(config.rank),
            size=config.size if ranks is None else len(ranks),
            started_as=ranks,
            store=self._client,
            secret=config.secret_key,
            generation=generation,
            key=host_key(config.hostname),
            timeout=config.start_timeout,
            data_timeout=config.gloo_timeout_seconds,
            interface=config.gloo_iface,
            streams=config.num_streams,
            carrier=Carrier(config, ranks, self._costs_of_mpi),
        )

    def failed(self) -> None:
        """The job over MPI has, whoever carried its data: MPI's end is to hold up nobody for long."""
        seconds = self._config.gloo_timeout_seconds
        if mpi_thread.thread_level() is not None:
            mpi_thread.finalise_within(
                seconds,
                f"horoplug: rank {self._config.rank}: MPI_Finalize has not returned for {seconds:g} s after the job "
                "had failed; this process ends without it (HOROVOD_GLOO_TIMEOUT_SECONDS sets this limit)",
            )

    def leave(self) -> None:
        """Say goodbye. At exit, call this *before* the engine shuts down: the launcher takes the order of goodbyes for
        the order of failures. Idempotent."""
        if self._client is not None:
            self._client.close()

    def close(self, *, patient: bool = False) -> None:
        """Say goodbye; on rank 0, stop serving. ``patient``: not before the others have left, too, who may be about to
        meet without this rank; but they have no longer than ``config.start_timeout`` for that. Idempotent."""
        self.leave()
        if self._server is not None:
            if patient:
                self._server.wait_for_clients(self._config.start_timeout)
            self._server.close()
