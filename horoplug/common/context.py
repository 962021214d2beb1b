"""The state of this process in the job: its engine, its connections, and the operations in flight.

:data:`context` is the package's only global state of a job. The process's MPI belongs to :mod:`horoplug.mpi.thread`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from horoplug._native import DirectCalls, Engine, Error, Status
from horoplug.base import descriptors, log
from horoplug.base.config import Config
from horoplug.base.errors import HorovodInternalError, NotInitializedError, RendezvousError
from horoplug.base.numbers import consecutive, numbers
from horoplug.common import compute_threads
from horoplug.common.added_sets import AddedSets, RegisteredProcessSet
from horoplug.common.engine_start import start_engine
from horoplug.common.in_flight import InFlight, Waitable
from horoplug.common.status import exception
from horoplug.rendezvous.bootstrap.bootstrap import BootstrapResult, bootstrap
from horoplug.rendezvous.bootstrap.launcher_environment import inherited, recognise
from horoplug.rendezvous.connections.peers import PeerConnections
from horoplug.rendezvous.elastic.member import DismissedError
from horoplug.rendezvous.elastic.messages import HostUpdate
from horoplug.rendezvous.network.fork import close_in_children
from horoplug.rendezvous.session import Rendezvous
from horoplug.rendezvous.store.report import Report
from horoplug.rendezvous.store.server import StoreServer


class Context:
    """The state between ``init`` and ``shutdown``, which can be repeated any number of times."""

    def __init__(self) -> None:
        self.operations: dict[int, InFlight] = {}
        """The operations and batches in flight, by the handles that the user holds."""
        self.blocking: dict[int, tuple[Any, ...]] = {}
        """Tensors of blocking operations that are in the core now, which have no handle; see :meth:`hold`."""
        self.process_sets: dict[int, RegisteredProcessSet] = {}
        """The sets that are registered, by id, without the global set."""
        self.added_sets = AddedSets()
        """The sets that ``add_process_set`` has added."""
        self.is_elastic = False
        """Whether this process was started in an elastic job, so that ``init`` may return with other ranks each
        time."""
        self.initial_sets: Any = None
        """The argument ``process_sets`` of the last ``init``."""
        self.commits = 0
        """Commits of an elastic state since the last membership of an elastic job was formed."""
        self.has_state = False
        """Whether the program has had the state of the training of an elastic job."""
        self.keeps_state = False
        """Whether it keeps the state with which it has left the last membership of an elastic job."""
        self.must_sync = True
        """Whether all ranks must synchronise their elastic states. In an elastic job, the launcher has decided it."""
        self.on_host_update: Callable[[HostUpdate], None] = lambda update: None
        """Called in another thread as soon as this process of an elastic job learns that processes should come or
        go."""
        self.ranks: tuple[int, ...] | None = None
        """The processes of the job, by the ranks that the launcher gave them; None: all."""
        self._followers: list[Callable[[Engine | None], None]] = []
        self._at_init: list[Callable[[], None]] = []
        self._fresh: set[tuple[int, str]] = set()  # see check_name()
        self._engine: Engine | None = None
        self._connections: PeerConnections | None = None
        self._streams: list[tuple[int, os.stat_result]] = []  # connections to other ranks
        self._lock = threading.Lock()
        self._rendezvous: Rendezvous | None = None  # survives shutdown
        self._identity: tuple[object, ...] = ()  # the settings for which the rendezvous was created
        # Rank and rendezvous of a process that another launcher than horovodrun has started.
        self._bootstrap: BootstrapResult | None = None
        # Number of rendezvous so far, by the ranks that took part (None: all).
        self._generations: dict[tuple[int, ...] | None, int] = {}
        # Handles are not reused after another init, so that stale ones are recognized.
        self._numbers = numbers()
        self.direct = DirectCalls(self._fresh, self.operations, self._numbers)
        """What public functions that call the core at once share."""
        self._first_number = 1
        self._report: Report | None = None
        self._hooked = False
        self._timeline_allowed = False
        self._told_threads = False  # how many compute threads this process has

    @property
    def initialized(self) -> bool:
        """Whether the engine runs: between ``init`` and ``shutdown``."""
        return self._engine is not None

    @property
    def job(self) -> int:
        """Identifies the job: another number after each ``init``."""
        return self._first_number

    @property
    def over_mpi(self) -> bool:
        """Whether the ranks found each other over MPI."""
        return self._bootstrap is not None and self._bootstrap.over_mpi

    def engine(self) -> Engine:
        """The running engine. Raises NotInitializedError if there is none."""
        engine = self._engine
        if engine is None:
            raise NotInitializedError
        return engine

    def check_running(self) -> None:
        """Raise HorovodInternalError if the job has failed, although no operation has reported it yet. Does nothing
        without a job."""
        if self._engine is not None and self._engine.stats()["failed"]:
            raise HorovodInternalError("the job has failed while operations were in flight")

    def connections(self) -> PeerConnections:
        """This rank's connections, with its rank and the size of the job.

        Raises NotInitializedError before init and after shutdown."""
        connections = self._connections
        if connections is None:
            raise NotInitializedError
        return connections

    def init(
        self, ranks: tuple[int, ...] | None = None, process_sets: Sequence[Sequence[int]] = ()
    ) -> bool:
        """Connect to the other ranks and start the engine. Does nothing if the engine is running. Returns whether the
        engine was started.

        ``ranks``: the processes of the job, by the ranks that the launcher gave them, in this order; None: all. The
        n-th call with the same ``ranks`` on one rank is paired with the n-th on every other one. ``process_sets``: the
        ranks of each set that the caller will add. Raises ValueError if another rank gives different sets."""
        with self._lock:
            if self._engine is not None:
                return False
            self._forget_stale()
            descriptors.raise_limit()
            config, server = self._recognise_launcher(Config.from_env())
            self._hook_process()
            self.ranks = ranks
            self.is_elastic = config.elastic_process is not None
            config = self._connect_and_start(config, ranks, process_sets, server)
            logger = log.logger
            config.log_notes(logger)
            self._settle_threads(config)
            self._tell_followers()
            self._begin_timeline(config, logger)
            if config.rank == 0 and config.status_seconds:
                self._report = Report(config, self.engine().stats)
            return True

    def _connect_and_start(
        self,
        config: Config,
        ranks: tuple[int, ...] | None,
        process_sets: Sequence[Sequence[int]],
        server: StoreServer | None,
    ) -> Config:
        """Connect to the other ranks and start the engine. Returns the configuration with this process's rank.

        In an elastic job, processes that are left after a failure meanwhile connect again, and process sets with ranks
        that do not exist are left out."""
        log.configure(config.log_level, hide_time=config.log_hide_time, rank=config.rank)
        while True:
            if self.is_elastic:
                config, connections = self._join_elastic_job(config, ranks)
                process_sets = [each for each in process_sets if max(each, default=0) < config.size]
                log.configure(config.log_level, hide_time=config.log_hide_time, rank=config.rank)
            else:
                connections = self._connect(config, ranks, server)
            streams = [(fd, os.fstat(fd)) for fd in connections.streams]
            try:
                engine = start_engine(config, connections, process_sets)
                if connections.service is not None:
                    connections.service.start(engine)
            except Error as error:
                connections.close()
                if error.args[0] == Status.MISMATCH:
                    raise ValueError(error.args[1]) from None
                failure = exception(error)
                if not self.is_elastic or not isinstance(failure, HorovodInternalError):
                    raise failure from None
                log.logger.warning("elastic: the processes connect again: %s", failure)
                continue
            self._engine, self._connections, self._streams = engine, connections, streams
            self.direct.use(engine if config.direct_calls else None)
            return config

    def _settle_threads(self, config: Config) -> None:
        connections = self.connections()
        ranks = connections.local_size
        if config.thread_share and (ranks > 1 or self.is_elastic):
            other_launcher = self._bootstrap is not None
            line = compute_threads.settle(connections, ranks, other_launcher=other_launcher)
            if line and config.rank == 0 and not self._told_threads:
                log.logger.warning("%s", line)
            self._told_threads = True

    def _begin_timeline(self, config: Config, logger: logging.Logger) -> None:
        self._timeline_allowed = config.timeline is not None
        if config.timeline is None or config.timeline == "DYNAMIC":
            return
        try:
            self.start_timeline(config.timeline, config.timeline_mark_cycles)
        except ValueError as error:  # does not stop the job
            logger.warning("%s (HOROVOD_TIMELINE)", error)

    def start_timeline(self, path: str | os.PathLike[str], mark_cycles: bool) -> None:
        """See :func:`horoplug.common.basics.start_timeline`."""
        engine = self.engine()
        if not self._timeline_allowed:
            raise ValueError(
                "Set HOROVOD_TIMELINE=DYNAMIC before init() to be able to start a timeline later"
            )
        file = os.fsencode(path)
        if b"\0" in file:
            raise ValueError(f"the path of the timeline, {path!r}, contains a null character")
        try:
            engine.timeline_start(file, mark_cycles)
        except Error as error:
            raise exception(error) from None

    def _recognise_launcher(self, config: Config) -> tuple[Config, StoreServer | None]:
        """The configuration. If another launcher than horovodrun has started this process, its rank and rendezvous are
        filled in, and the first call on rank 0 also returns the store server that rank 0 runs."""
        launched = recognise(os.environ)
        if launched is None:
            if line := inherited(os.environ):
                note = logging.WARNING, line
                config = dataclasses.replace(config, notes=(*config.notes, note))
            if config.size > 1 and "mpi" in (config.controller, config.cpu_operations):
                name = "CONTROLLER" if config.controller == "mpi" else "CPU_OPERATIONS"
                raise ValueError(
                    f"HOROVOD_{name}=mpi needs ranks that mpirun has started, and mpirun has not started this one; "
                    "start the job with mpirun, or unset the variable"
                )
            return config, None
        server = None
        if self._bootstrap is None:
            self._bootstrap, server = bootstrap(config, launched)
        return self._bootstrap.apply(config), server

    def _connect(
        self, config: Config, ranks: tuple[int, ...] | None, server: StoreServer | None
    ) -> PeerConnections:
        if ranks is not None:
            _check_ranks(ranks, config)
        identity = (
            config.rank,
            config.size,
            config.rendezvous_addr,
            config.rendezvous_port,
            config.secret_key,
            config.encrypt,
        )
        if self._rendezvous is None or self._identity != identity:
            if self._rendezvous is not None:
                self._rendezvous.close()
                self._rendezvous = None
            self._rendezvous = Rendezvous(config, server)
            self._identity = identity
            self._generations = {}
        generation = self._generations.get(ranks, 0)
        # Count the generation even if connecting fails, because it then fails on all ranks.
        self._generations[ranks] = generation + 1
        return self._rendezvous.connect(generation, ranks)

    def _join_elastic_job(
        self, config: Config, ranks: tuple[int, ...] | None
    ) -> tuple[Config, PeerConnections]:
        """Take part in the next membership. Returns the configuration with this process's rank and the size of the job,
        and its connections. If processes fail while they connect, they form a further membership.

        Ends the program (SystemExit) if the launcher does not need this process any more. Errors: those of
        :meth:`horoplug.rendezvous.elastic.member.ElasticMember.join`."""
        if ranks is not None:
            raise ValueError(
                "init(comm=...) cannot choose the processes of an elastic job, which come and go; call init() "
                "without it"
            )
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(config)
        member = self._rendezvous.elastic_member
        assert member is not None
        while True:
            commits, self.commits = self.commits, 0
            keeps_state, self.keeps_state = self.keeps_state, False
            try:
                membership = member.join(commits, has_state=self.has_state, keeps_state=keeps_state)
            except DismissedError as dismissal:
                log.logger.info("%s", dismissal)
                raise SystemExit(0) from None
            try:
                connections = self._rendezvous.connect_members(membership)
            except RendezvousError as error:
                log.logger.warning("elastic: the processes connect again: %s", error)
                continue
            member.watch(membership, self._active_seconds, self._on_host_update)
            self.must_sync = membership.must_sync
            config = dataclasses.replace(config, rank=connections.rank, size=connections.size)
            return config, connections

    def report_mismatch(self, reason: str) -> None:
        """Tell the launcher of an elastic job that this process ends because its state is another one than rank 0's."""
        member = None if self._rendezvous is None else self._rendezvous.elastic_member
        if member is not None:
            with contextlib.suppress(
                RendezvousError
            ):  # the launcher has ended, and so does the job
                member.report_mismatch(reason)

    def _active_seconds(self) -> float:
        """For how many seconds operations have been in flight since ``init``."""
        engine = self._engine
        return 0.0 if engine is None else engine.stats()["active_microseconds"] / 1e6

    def _on_host_update(self, update: HostUpdate) -> None:
        try:
            self.on_host_update(update)
        except Exception as error:
            log.logger.warning("elastic: on_hosts_updated has failed: %r", error)

    def host_update(self, *, leaves: bool = False) -> HostUpdate | None:
        """Make a check for an update: that processes of an elastic job should come or go. If there is one, the same
        check of all ranks returns it. Sends nothing.

        ``leaves``: whether this process was told to leave, which the launcher learns by that."""
        member = None if self._rendezvous is None else self._rendezvous.elastic_member
        if member is None:
            return None
        if leaves:
            with contextlib.suppress(
                RendezvousError
            ):  # the launcher has ended, and so does the job
                member.leave()
        return member.check()

    def shutdown(self) -> None:
        """Leave the job, and tell the other ranks. Does nothing without a job. Operations in flight fail on all
        ranks. Nothing of the job remains open, whatever handles the program still has."""
        with self._lock:
            engine, connections = self._engine, self._connections
            self._engine = self._connections = None
            self.direct.use(None)
            self._streams = []
            self._forget_process_sets()
            report, self._report = self._report, None
            if report is not None:
                report.close()
            if engine is not None:
                engine.shutdown()
                self._tell_followers()
            if connections is None:
                return
            connections.close()
            failed = engine is None or bool(engine.stats()["failed"])
            if connections.mpi is not None:
                connections.mpi.close(failed)
            if (
                failed
                and self._rendezvous is not None
                and (self.over_mpi or connections.mpi is not None)
            ):
                self._rendezvous.failed()

    def follow(self, follower: Callable[[Engine | None], None]) -> None:
        """Call a function with the engine that runs now, if there is one, and with every engine that starts later. The
        function is also called with None after an engine has shut down. The engine may be destroyed when that call
        returns."""
        with self._lock:
            self._followers.append(follower)
            if self._engine is not None:
                follower(self._engine)

    def at_init(self, forget: Callable[[], None]) -> None:
        """Call a function in each ``init``, which forgets state of the previous job; see
        :mod:`horoplug.common.per_job`."""
        self._at_init.append(forget)

    def _tell_followers(self) -> None:
        for follower in self._followers:
            follower(self._engine)

    def track(self, operation: Waitable) -> int:
        """Keep an operation and its tensors until it is done; returns the handle for the user."""
        number = next(self._numbers)
        self.operations[number] = operation
        return number

    def hold(self, tensors: tuple[Any, ...]) -> int:
        """Keep the tensors of a blocking operation alive until ``blocking.pop`` of the returned key, or, if an
        exception such as KeyboardInterrupt prevents that, until the next init."""
        key = next(self._numbers)
        self.blocking[key] = tensors
        return key

    def track_batch(self, batch: InFlight, count: int) -> list[int]:
        """Like :meth:`track` for a batch of ``count`` operations; their handles are consecutive."""
        handles = consecutive(self._numbers, count)
        self.operations.update(dict.fromkeys(handles, batch))
        return handles

    def drop(self, handles: Iterable[int]) -> None:
        """Forget these handles."""
        for handle in handles:
            self.operations.pop(handle, None)

    def check_name(self, process_set: int, name: str) -> None:
        """Raises ValueError if an operation of this name was submitted and the program has not waited for any operation
        since. The program then cannot know that the operation is done. The core may have finished it already, but
        timing must not decide whether a name is refused."""
        if (process_set, name) in self._fresh:
            raise ValueError(
                f"{name} is still in flight; wait for it before you submit another operation of the "
                "same name, or give this one another name"
            )

    def submitted(self, process_set: int, name: str) -> None:
        """Record that an operation of this name was submitted, for :meth:`check_name`."""
        self._fresh.add((process_set, name))

    def waited(self) -> None:
        """Record that the program has waited for an operation. From now on the core alone decides whether the names of
        earlier operations are in flight."""
        self._fresh.clear()

    def find(self, handle: int) -> Waitable | None:
        """The operation of a handle; None if it is unknown or was waited for.

        Raises HorovodInternalError for a handle from before the last init, and TypeError for an unhashable object."""
        operation = self.operations.get(handle)
        if operation is not None:
            return operation.waitable(handle)
        if isinstance(handle, int) and 0 < handle < self._first_number:
            raise HorovodInternalError(
                f"handle {handle} belongs to a job that was shut down before its result was asked for"
            )
        return None

    def _forget_stale(self) -> None:
        """Drop the operations of the previous job that were not waited for. The core no longer writes to their
        tensors."""
        for operation in {id(entry): entry for entry in self.operations.values()}.values():
            operation.abandon()
        self.operations.clear()
        self.blocking.clear()
        for forget in self._at_init:
            forget()
        self._fresh.clear()
        self._first_number = next(self._numbers)

    def _forget_process_sets(self) -> None:
        for process_set in self.process_sets.values():
            process_set._invalidate()
        self.process_sets.clear()
        self.added_sets.invalidate()

    def _hook_process(self) -> None:
        if not self._hooked:
            self._hooked = True
            atexit.register(self._at_exit)
            close_in_children(self)

    def _at_exit(self) -> None:
        rendezvous = self._rendezvous
        if rendezvous is not None:
            rendezvous.leave()  # before the engine shuts down: see Rendezvous.leave
        self.shutdown()
        if rendezvous is not None:
            rendezvous.close(patience=rendezvous.start_timeout)

    def forget(self) -> None:
        """Reset the state in a forked child, such as the worker of a data loader, which is not a rank. The object of
        the parent's engine recognizes the child and does nothing there, also when it is destroyed."""
        self.operations.clear()
        self.blocking.clear()
        self._forget_process_sets()
        self._engine = self._connections = self._rendezvous = self._report = None
        self.direct.use(None)
        self._lock = threading.Lock()  # another thread of the parent may hold the old one
        # Copies in the child would keep the connections open after the parent's death, which peers would not notice.
        for fd, stat in self._streams:
            with contextlib.suppress(OSError):  # the engine has closed it
                if os.path.samestat(os.fstat(fd), stat):
                    os.close(fd)
        self._streams = []


def _check_ranks(ranks: tuple[int, ...], config: Config) -> None:
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < config.size for rank in ranks):
        raise ValueError(
            f"init(comm={list(ranks)}): the ranks must be distinct numbers from 0 to {config.size - 1}"
        )
    if config.rank not in ranks:
        raise ValueError(
            f"init(comm={list(ranks)}) was called by rank {config.rank}, which is not in the list; call init() with "
            "a list that contains it"
        )


context = Context()
