"""MPI as what carries the data between hosts: whether it can, how fast it is, and what the core has to know of it.

mpi4py has chosen the process's MPI and initialised it. The core is given the addresses of its functions and the values
of its handles, and calls it directly; neither of the two was compiled with an ``mpi.h``. Ranks are connected and
authenticated before that, without MPI, and those connections carry all control messages.

Nothing here waits without a deadline, or takes part in anything before all ranks have said that they will."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, ParamSpec, TypeVar, cast

from horoplug.base.config import Config
from horoplug.base.errors import MissingRanksError
from horoplug.mpi import cuda as mpi_cuda
from horoplug.mpi import thread as mpi_thread
from horoplug.mpi.measure import (
    Costs,
    Own,
    Steps,
    answer,
    speed_of,
    time_collectives,
    time_messages,
    until,
)

P = ParamSpec("P")
T = TypeVar("T")

# MPI's names by the core's numbers of dtypes and of reductions; None: MPI has none, or another idea of it.
_DTYPES: Final = (
    *("UINT8_T", "INT8_T", "UINT16_T", "INT16_T", "INT32_T", "INT64_T"),
    *(None, "FLOAT", "DOUBLE", None, None, "UINT32_T", "UINT64_T"),
)
_OPS: Final = ("SUM", "SUM", None, "MIN", "MAX", "PROD")
_FUNCTIONS: Final = ("isend", "irecv", "test", "cancel", "finalized", "error_string")
_COLLECTIVES: Final = (
    *("iallreduce", "ibcast", "iallgatherv", "ialltoallv", "ireduce_scatter", "ibarrier"),
)

_GRACE: Final = 2.0  # seconds


def choice(config: Config) -> str | None:
    """What the user wants to carry data between hosts: "mpi", "gloo" (TCP), or None: whatever is faster."""
    if config.cpu_operations in ("mpi", "gloo"):
        return config.cpu_operations
    return "gloo" if config.controller == "gloo" else None


def _where_mpi_may_be_called(method: Callable[P, T]) -> Callable[P, T]:
    """Its last argument is a deadline, which it heeds, but MPI may not."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        late = cast(float, args[-1]) - time.monotonic() + _GRACE
        try:
            return mpi_thread.run(method, *args, seconds=late)
        except TimeoutError:
            raise MissingRanksError((), "MPI does not return from a call") from None

    return call


Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Where costs were measured: the MPI, the job's ranks as they were started, and by rank the host's number."""

# By how a library's name begins: collectives of its own that are not used. Intel's Iallgatherv may never end if parts
# differ in size, by the algorithm that it takes itself for large ones (I_MPI_ADJUST_IALLGATHERV=3; seen in 2021.19).
_UNUSED: Final = {"Intel": ("iallgatherv",)}


class Carrier:
    """MPI between the ranks of a job; :meth:`obstacle` says whether it can carry data."""

    def __init__(
        self,
        config: Config,
        ranks: Sequence[int] | None = None,
        known: dict[Place, Costs] | None = None,
    ) -> None:
        """``ranks``: those of the started processes that make up the job; None: all. ``known``: what this process has
        measured before, and where; it is kept up."""
        self.wanted = choice(config)
        self.ranks = ranks
        self.costs: Costs | None = None
        self._known = {} if known is None else known
        self._rank, self._size = config.rank, config.size
        self._patience = config.gloo_timeout_seconds
        self._mpi_cuda = config.mpi_cuda
        self._on_gpu = mpi_cuda.OnGpu.NOTHING
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
        """Whether one thread makes all calls."""
        return mpi_thread.funnel() is not None

    @property
    def initialised_here(self) -> bool:
        """Whether the program has left MPI to horoplug."""
        return mpi_thread.initialised_here()

    @property
    def library(self) -> str:
        """The MPI's name and version."""
        if self._MPI is None:
            return "no MPI"
        return " ".join(self._MPI.Get_library_version().split("\n")[0].split(",")[0].split())

    def obstacle(self) -> str:
        """Why MPI cannot carry data here, or ''."""
        if self._MPI is None:
            return self._failure or "MPI is not in use"
        level = self.level
        if level is None:
            return "MPI is not initialised, or finalised already"
        try:
            place = mpi_thread.run(self._place_in_mpi, seconds=self._patience)
        except TimeoutError:
            return "MPI does not return from a call"
        if place != (self._rank, self._size):
            return f"to MPI this is rank {place[0]} of {place[1]}: no mpirun has started the job"
        levels = mpi_thread.LEVELS
        return _too_low(level) if levels.index(level) < levels.index(self._least()) else ""

    def _place_in_mpi(self) -> tuple[int, int]:
        return self._MPI.COMM_WORLD.rank, self._MPI.COMM_WORLD.size

    def _least(self) -> str:
        """The thread level that horoplug needs."""
        if self.initialised_here:
            return "funneled"
        return "serialized" if self.wanted == "mpi" else "multiple"

    @_where_mpi_may_be_called
    def connect(self, deadline: float) -> None:
        """Make a communicator for the core alone. Collective. Errors: MissingRanksError."""
        MPI = self._MPI
        base = MPI.COMM_WORLD
        if self.ranks is not None:
            base = _group_communicator(MPI, tuple(self.ranks))
        self._communicator, request = base.Idup()
        self._finish([until(request)], deadline)
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self._on_gpu = mpi_cuda.asked(MPI, self._mpi_cuda)

    def known(self, hosts: Sequence[int]) -> Costs | None:
        """What the job's ranks have agreed on before, when they were on these hosts, by rank."""
        return self._known.get(self._place(hosts))

    def agreed(self, hosts: Sequence[int], costs: Costs) -> None:
        """Go by these costs, now and whenever the ranks meet again."""
        self.costs = self._known[self._place(hosts)] = costs

    def _place(self, hosts: Sequence[int]) -> Place:
        ranks = range(self._size) if self.ranks is None else self.ranks
        return self.library, tuple(ranks), tuple(hosts)

    @_where_mpi_may_be_called
    def measure(self, to: int | None, back: int | None, deadline: float) -> Costs | None:
        """Time messages to the rank ``to`` while ``back`` times those to this one, and then MPI's own collectives.
        Collective. None if there was nothing to measure. Errors: MissingRanksError."""
        trips: list[float] = []
        bursts: list[float] = []
        own: list[Own] = []
        tasks = [] if to is None else [time_messages(self._communicator, to, trips, bursts)]
        tasks += [] if back is None else [answer(self._communicator, back)]
        self._finish(tasks, deadline)
        self._finish([time_collectives(self._MPI, self._communicator, own)], deadline)
        return None if to is None else Costs(speed_of(trips, bursts), tuple(own))

    def description(self) -> dict[str, Any]:
        """What the core has to know: the fields of ``hp_mpi``."""
        MPI = self._MPI
        library = mpi_thread.library(MPI)

        unused = next(
            (names for start, names in _UNUSED.items() if self.library.startswith(start)), ()
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
            "on_gpu": int(self._on_gpu),
            "byte": handle("BYTE"),
            "in_place": int(MPI.IN_PLACE) % 2**64,
            "dtypes": [handle(name) for name in _DTYPES],
            "ops": [handle(name) for name in _OPS],
            **{name: address(name) for name in (*_FUNCTIONS, *_COLLECTIVES)},
            "costs": self.costs.own if self.costs else (),
            "worker": mpi_thread.funnel(),
        }

    def close(self, failed: bool = False) -> None:
        """Give the communicator back, unless the job has failed: MPI may still be busy with it. Idempotent."""
        communicator, self._communicator = self._communicator, None
        if communicator is None or self.level is None or failed:
            return
        with contextlib.suppress(self._MPI.Exception, TimeoutError):
            mpi_thread.run(communicator.Free, seconds=self._patience)

    def _finish(self, tasks: Iterable[Steps], deadline: float) -> None:
        """Run them side by side."""
        running = list(tasks)
        while running:
            running = [task for task in running if next(task, running) is None]
            if running and time.monotonic() > deadline:
                raise MissingRanksError((), "MPI has not connected the ranks in time")
            os.sched_yield()


_groups: dict[tuple[int, ...], Any] = {}


def _group_communicator(MPI: Any, ranks: tuple[int, ...]) -> Any:
    """A communicator of some of all processes, made once: by all of them, and by nobody else."""
    if ranks not in _groups:
        _groups[ranks] = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(list(ranks)))
    return _groups[ranks]


def _too_low(level: str) -> str:
    if level == "serialized":
        return (
            "MPI's thread level is 'serialized', and the program may call it at the same time as horoplug: leave "
            "mpi4py.rc.thread_level alone, or set HOROVOD_CPU_OPERATIONS=mpi if it does not"
        )
    return (
        f"MPI's thread level is '{level}', which leaves it to the program's own thread: set mpi4py.rc.initialize = "
        "False before mpi4py.MPI is imported, so that horoplug initialises it, or leave mpi4py.rc.thread_level alone"
    )
