"""MPI as the transport of data between hosts: whether it is usable, how fast it is, and what the core needs to call it.

mpi4py has chosen the process's MPI library and initialised it. The core receives the addresses of MPI's functions and
the values of its handles and calls MPI directly; neither was compiled against an ``mpi.h``. Ranks connect and
authenticate over TCP and Unix sockets before that, without MPI, and those connections carry all control messages.

Every wait in this module has a deadline. A collective MPI call starts only after all ranks have agreed to take part."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, ParamSpec, TypeVar, cast

from horoplug._native import MpiOnGpu, dtypes
from horoplug.base.config import Config
from horoplug.base.errors import MissingRanksError
from horoplug.mpi import cuda as mpi_cuda
from horoplug.mpi import thread as mpi_thread
from horoplug.mpi.measure import (
    CollectiveCost,
    Costs,
    Steps,
    answer,
    speed_of,
    time_collectives,
    time_messages,
    until,
)

P = ParamSpec("P")
T = TypeVar("T")

# MPI's names of reductions, by the core's numbers. None: MPI has no equivalent.
_OPS: Final = ("SUM", "SUM", None, "MIN", "MAX", "PROD")
_FUNCTIONS: Final = ("isend", "irecv", "test", "cancel", "finalized", "error_string")
_COLLECTIVES: Final = (
    *("iallreduce", "ibcast", "iallgatherv", "ialltoallv", "ireduce_scatter", "ibarrier"),
)

# By the beginning of the library's version text: collectives that are not used. Intel MPI's Iallgatherv may hang on
# parts of different sizes with the algorithm that it chooses for large ones (I_MPI_ADJUST_IALLGATHERV=3; 2021.19).
_UNUSED_COLLECTIVES: Final = {"Intel": ("iallgatherv",)}

_GRACE: Final = 2.0  # seconds that a call may exceed its own deadline before MPI counts as hung


def requested_transport(config: Config) -> str | None:
    """The transport between hosts that the variables request: "mpi", "gloo" (TCP), or None for the faster one."""
    if config.cpu_operations in ("mpi", "gloo"):
        return config.cpu_operations
    return "gloo" if config.controller == "gloo" else None


def _on_mpi_thread(method: Callable[P, T]) -> Callable[P, T]:
    """Decorator: runs a method on a thread that may call MPI. The method's last argument is a deadline
    (``time.monotonic()``), which the method itself observes. If MPI blocks in a call beyond the deadline, the caller
    gets MissingRanksError."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        seconds = cast(float, args[-1]) - time.monotonic() + _GRACE
        try:
            return mpi_thread.run(method, *args, seconds=seconds)
        except TimeoutError:
            raise MissingRanksError((), "MPI does not return from a call") from None

    return call


CostsKey = tuple[str, tuple[int, ...], tuple[int, ...]]
"""The conditions under which costs were measured: the MPI library, the launched ranks that form the job, and each
rank's host index."""


class MpiTransport:
    """MPI between the ranks of a job; :meth:`obstacle` says whether it can carry data."""

    def __init__(
        self,
        config: Config,
        ranks: Sequence[int] | None = None,
        known: dict[CostsKey, Costs] | None = None,
    ) -> None:
        """``ranks``: the launched ranks that form the job; None: all. ``known``: costs that this process has measured
        before; :meth:`use_costs` adds to it."""
        self.wanted = requested_transport(config)
        self.ranks = ranks
        self.costs: Costs | None = None
        self._known = {} if known is None else known
        self._rank, self._size = config.rank, config.size
        self._call_seconds = config.data_timeout
        self._mpi_cuda = config.mpi_cuda
        self._gpu_support = MpiOnGpu.NOTHING
        self._communicator: Any = None
        self._MPI = mpi_thread.loaded()
        self._failure = ""
        if self._MPI is None and self.wanted == "mpi":
            try:
                self._MPI = mpi_thread.load()
                mpi_thread.initialise(self._MPI)
            except (ImportError, RuntimeError) as error:
                self._failure = "mpi4py cannot be used: " + " ".join(str(error).split())

    @property
    def level(self) -> str | None:
        """See :func:`horoplug.mpi.thread.thread_level`."""
        return mpi_thread.thread_level()

    @property
    def funneled(self) -> bool:
        """Whether one thread makes all MPI calls."""
        return mpi_thread.mpi_worker() is not None

    @property
    def initialised_here(self) -> bool:
        """Whether horoplug, and not the program, has initialised MPI."""
        return mpi_thread.initialised_here()

    @property
    def library(self) -> str:
        """Name and version of the MPI library."""
        if self._MPI is None:
            return "no MPI"
        return " ".join(self._MPI.Get_library_version().split("\n")[0].split(",")[0].split())

    def obstacle(self) -> str:
        """Why MPI cannot carry data in this process; empty if it can."""
        if self._MPI is None:
            return self._failure or "MPI is not in use"
        level = self.level
        if level is None:
            return "MPI is not initialised, or finalised already"
        try:
            rank, size = mpi_thread.run(self._world_rank_and_size, seconds=self._call_seconds)
        except TimeoutError:
            return "MPI does not return from a call"
        if (rank, size) != (self._rank, self._size):
            return f"MPI sees this process as rank {rank} of {size}: mpirun has not started the job"
        levels = mpi_thread.LEVELS
        too_low = levels.index(level) < levels.index(self._required_level())
        return _level_too_low(level) if too_low else ""

    def _world_rank_and_size(self) -> tuple[int, int]:
        return self._MPI.COMM_WORLD.rank, self._MPI.COMM_WORLD.size

    def _required_level(self) -> str:
        """The lowest thread level with which MPI can carry data."""
        if self.initialised_here:
            return "funneled"
        return "serialized" if self.wanted == "mpi" else "multiple"

    @_on_mpi_thread
    def connect(self, deadline: float) -> None:
        """Create a communicator for the core alone. Collective over the job. Raises MissingRanksError after the
        deadline."""
        MPI = self._MPI
        base = MPI.COMM_WORLD
        if self.ranks is not None:
            base = _group_communicator(MPI, tuple(self.ranks))
        self._communicator, request = base.Idup()
        self._finish([until(request)], deadline)
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self._gpu_support = mpi_cuda.gpu_support(MPI, self._mpi_cuda)

    def known_costs(self, hosts: Sequence[int]) -> Costs | None:
        """The costs that the same ranks on the same hosts have agreed on before; None if there are none.

        ``hosts``: each rank's host index."""
        return self._known.get(self._key(hosts))

    def use_costs(self, hosts: Sequence[int], costs: Costs) -> None:
        """Use these costs now, and remember them for when the same ranks connect again."""
        self.costs = self._known[self._key(hosts)] = costs

    def _key(self, hosts: Sequence[int]) -> CostsKey:
        ranks = range(self._size) if self.ranks is None else self.ranks
        return self.library, tuple(ranks), tuple(hosts)

    @_on_mpi_thread
    def measure(self, to: int | None, back: int | None, deadline: float) -> Costs | None:
        """Time messages to rank ``to`` while rank ``back`` times messages to this rank; then time MPI's collectives.

        Collective over the job. Returns None if ``to`` is None. Raises MissingRanksError after the deadline."""
        trips: list[float] = []
        bursts: list[float] = []
        collectives: list[CollectiveCost] = []
        tasks = [] if to is None else [time_messages(self._communicator, to, trips, bursts)]
        tasks += [] if back is None else [answer(self._communicator, back)]
        self._finish(tasks, deadline)
        self._finish([time_collectives(self._MPI, self._communicator, collectives)], deadline)
        return None if to is None else Costs(speed_of(trips, bursts), tuple(collectives))

    def description(self) -> dict[str, Any]:
        """The fields of ``hp_mpi``, which tell the core how to call MPI."""
        MPI = self._MPI
        library = mpi_thread.library(MPI)

        unused = next(
            (
                names
                for start, names in _UNUSED_COLLECTIVES.items()
                if self.library.startswith(start)
            ),
            (),
        )

        def address(name: str) -> int:
            if name in unused:
                return 0
            function = getattr(library, f"MPI_{name.capitalize()}", None)
            if function is None and name not in _COLLECTIVES:
                raise ValueError(f"{self.library} has no MPI_{name.capitalize()}")
            return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0

        def handle(name: str | None) -> int:
            value = getattr(MPI, name, None) if name else None
            if value is None or value in (MPI.DATATYPE_NULL, MPI.OP_NULL):
                return 0
            return int(MPI._handleof(value)) % 2**64

        return {
            "handle_bytes": MPI._sizeof(MPI.Comm),
            "communicator": int(MPI._handleof(self._communicator)) % 2**64,
            "on_gpu": int(self._gpu_support),
            "byte": handle("BYTE"),
            "in_place": int(MPI.IN_PLACE) % 2**64,
            "dtypes": [handle(mpi.removeprefix("MPI_")) for _, _, _, mpi, *_ in dtypes()],
            "ops": [handle(name) for name in _OPS],
            **{name: address(name) for name in (*_FUNCTIONS, *_COLLECTIVES)},
            "costs": self.costs.collectives if self.costs else (),
            "worker": mpi_thread.mpi_worker(),
        }

    def close(self, failed: bool = False) -> None:
        """Free the communicator, unless the job has failed: MPI may then still be using it. Idempotent."""
        communicator, self._communicator = self._communicator, None
        if communicator is None or self.level is None or failed:
            return
        with contextlib.suppress(self._MPI.Exception, TimeoutError):
            mpi_thread.run(communicator.Free, seconds=self._call_seconds)

    def _finish(self, tasks: Iterable[Steps], deadline: float) -> None:
        """Interleave measurements until all are done. Raises MissingRanksError after the deadline."""
        running = list(tasks)
        while running:
            running = [task for task in running if next(task, running) is None]
            if running and time.monotonic() > deadline:
                raise MissingRanksError((), "MPI has not connected the ranks in time")
            os.sched_yield()


_groups: dict[tuple[int, ...], Any] = {}


def _group_communicator(MPI: Any, ranks: tuple[int, ...]) -> Any:
    """The communicator of these world ranks. Created on the first call, collectively over these ranks only."""
    if ranks not in _groups:
        _groups[ranks] = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(list(ranks)))
    return _groups[ranks]


def _level_too_low(level: str) -> str:
    if level == "serialized":
        return (
            "MPI's thread level is 'serialized', and the program may call MPI at the same time as horoplug: leave "
            "mpi4py.rc.thread_level alone, or set HOROVOD_CPU_OPERATIONS=mpi if the program does not call MPI"
        )
    return (
        f"MPI's thread level is '{level}', at which only the program's own thread may call MPI: set "
        "mpi4py.rc.initialize = False before mpi4py.MPI is imported, so that horoplug initialises MPI, or leave "
        "mpi4py.rc.thread_level alone"
    )
