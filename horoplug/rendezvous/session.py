"""Connects a process with the other ranks according to its configuration: one connection to the store, and connections
to peers for every generation.

Keep one Rendezvous from the first ``init()`` until the process ends, across shutdowns. Its connection to the store lets
the other ranks learn when this rank dies. On rank 0 it may also be the store's server, which all ranks need."""

from __future__ import annotations

from horoplug._native import version
from horoplug.base.config import Config
from horoplug.mpi import thread as mpi_thread
from horoplug.mpi.measure import Costs
from horoplug.mpi.transport import CostsKey, MpiTransport, requested_transport
from horoplug.rendezvous.connections.peers import PeerConnections, connect_peers
from horoplug.rendezvous.elastic.member import ElasticMember
from horoplug.rendezvous.elastic.messages import Membership
from horoplug.rendezvous.network.interfaces import interface_address
from horoplug.rendezvous.network.libcrypto import libcrypto
from horoplug.rendezvous.network.topology import host_key
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer


class Rendezvous:
    """This process's client of the store, and the store's server if this process runs it. A context manager."""

    def __init__(self, config: Config, server: StoreServer | None = None) -> None:
        """Connect to the store within ``config.start_timeout`` seconds; a job of one rank connects to nothing.

        ``server``: a server that this process runs already; it is closed with this object. Errors: ValueError if
        variables are missing, RendezvousError, AuthenticationError."""
        self._config = config
        self._server = server
        self._client: StoreClient | None = None
        self._mpi_costs: dict[CostsKey, Costs] = {}
        self._member: ElasticMember | None = None
        if config.size == 1 and config.elastic_process is None:
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
        address, port = config.rendezvous_addr, config.rendezvous_port
        try:
            # Report wrong settings before other ranks wait.
            if config.encrypt:
                _check_encryption(config)
            if config.gloo_iface:
                interface_address(config.gloo_iface)
            if config.rendezvous_server == "rank0" and config.rank == 0:
                self._server = _serve(config.secret_key, address, port)
            self._client = StoreClient.connect(
                address, port, config.secret_key, config.start_timeout, encrypt=config.encrypt
            )
        except BaseException:
            self.close()
            raise
        if config.elastic_process is not None:
            # Two reports in each window, so that the windows of all processes are nearly equally long.
            self._member = ElasticMember(
                self._client, config.elastic_process, version(), config.slow_seconds / 2
            )

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self, generation: int, ranks: tuple[int, ...] | None = None) -> PeerConnections:
        """Connect with all launched ranks, or only with ``ranks``, which become ranks 0, 1 … in this order. Collective.

        ``generation``: how many calls with the same ``ranks`` came before, the same on all of them.

        Errors: those of :func:`horoplug.rendezvous.connections.peers.connect_peers`."""
        rank = self._config.rank if ranks is None else ranks.index(self._config.rank)
        size = self._config.size if ranks is None else len(ranks)
        return self._connect(rank, size, generation, ranks)

    def _connect(
        self,
        rank: int,
        size: int,
        generation: int,
        launched: tuple[int, ...] | None,
        scope: str | None = None,
    ) -> PeerConnections:
        config = self._config
        return connect_peers(
            rank=rank,
            size=size,
            launched=launched,
            scope=scope,
            store=self._client,
            secret=config.secret_key,
            generation=generation,
            key=host_key(config.hostname),
            timeout=config.start_timeout,
            timeout_set_by=config.start_timeout_set_by,
            data_timeout=config.data_timeout,
            interface=config.gloo_iface,
            streams=config.num_streams,
            mpi=None if config.encrypt else MpiTransport(config, launched, self._mpi_costs),
            encrypt=config.encrypt,
            connect_all=config.connect_all,
        )

    @property
    def start_timeout(self) -> float:
        """Seconds within which the ranks have to connect to each other."""
        return self._config.start_timeout

    @property
    def elastic_member(self) -> ElasticMember | None:
        """This process's conversation with the launcher of an elastic job; None in other jobs."""
        return self._member

    def connect_members(self, membership: Membership) -> PeerConnections:
        """Connect with the other processes of a membership of an elastic job. Collective. Errors: those of
        :meth:`connect`."""
        processes = membership.processes
        rank = processes.index(self._config.elastic_process)
        return self._connect(
            rank, len(processes), membership.generation, processes, "elastic/mesh/"
        )

    def failed(self) -> None:
        """Tell the rendezvous that a job that runs under MPI has failed: MPI_Finalize then gets a time limit."""
        seconds = self._config.data_timeout
        if mpi_thread.thread_level() is not None:
            mpi_thread.finalise_within(
                seconds,
                f"horoplug: rank {self._config.rank}: MPI_Finalize has not returned for {seconds:g} s after the job "
                "had failed; this process ends without it (HOROVOD_GLOO_TIMEOUT_SECONDS sets this limit)",
            )

    def leave(self) -> None:
        """Tell the store that this rank leaves, so that it does not count as lost. Idempotent.

        At exit, call this *before* the engine shuts down: the launcher assumes that ranks leave in the order in which
        they have failed."""
        if self._member is not None:
            self._member.close()
        if self._client is not None:
            self._client.close()

    def close(self, *, patience: float = 0.0) -> None:
        """Leave the store and stop serving it. Idempotent.

        ``patience``: first wait up to so many seconds until the other ranks have left, since they may be about to
        connect to each other without this rank, or to read in the store why this rank has given up."""
        self.leave()
        if self._server is not None:
            self._server.wait_for_clients(patience)
            self._server.close()


def _serve(secret: bytes, address: str, port: int) -> StoreServer:
    try:
        return StoreServer(secret, address, port)
    except OSError as error:
        raise ValueError(
            f"rank 0 cannot serve the rendezvous at {address}:{port}: {error.strerror}"
        ) from None


def _check_encryption(config: Config) -> None:
    """Raises ValueError with a one-line message if the traffic between hosts cannot be encrypted."""
    if requested_transport(config) == "mpi":
        raise ValueError(
            "HOROPLUG_ENCRYPT=1 and HOROVOD_CPU_OPERATIONS=mpi exclude each other: horoplug cannot encrypt what MPI "
            "sends to other hosts; unset one of the two"
        )
    libcrypto()
