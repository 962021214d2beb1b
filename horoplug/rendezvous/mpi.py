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
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, cast

from horoplug.common.config import Config

from . import mpi_thread
from .errors import MissingRanksError
from .measure import Speed

P = ParamSpec("P")
T = TypeVar("T")

# MPI's names by the core's numbers of dtypes and of reductions; None: MPI has none, or another idea of it.
_DTYPES: Final = (
    *("UINT8_T", "INT8_T", "UINT16_T", "INT16_T", "INT32_T", "INT64_T"),
    *(None, "FLOAT", "DOUBLE", None, None, "UINT32_T", "UINT64_T"),
)
_OPS: Final = ("SUM", "SUM", None, "MIN", "MAX", "PROD")
_FUNCTIONS: Final = (
    *("isend", "irecv", "test", "cancel", "finalized", "error_string", "iallreduce"),
)
_OPTIONAL: Final = ("iallreduce",)

_PING, _ECHO, _BURST, _ACK = 11, 12, 13, 14  # tags; the core uses another one
_PINGS = 16
_PIECE = 128 * 1024
_PIECES = 4
_SMALL, _LARGE = 8, 1 << 20  # bytes of the allreduces that are timed
_REPEATS = (9, 3)
_GRACE = 2.0  # seconds


class Costs(NamedTuple):
    """What MPI takes, as all ranks together have measured it."""

    speed: Speed
    """Of messages between hosts."""
    latency: float
    """Seconds of MPI's own allreduce of next to nothing over all ranks."""
    byte: float
    """And of each byte more."""


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


class Carrier:
    """MPI between the ranks of a job; :meth:`obstacle` says whether it can carry data."""

    def __init__(self, config: Config, ranks: Sequence[int] | None = None) -> None:
        """``ranks``: those of the started processes that make up the job; None: all."""
        self.wanted = choice(config)
        self.ranks = ranks
        self.costs: Costs | None = None
        self._rank, self._size = config.rank, config.size
        self._patience = config.gloo_timeout_seconds
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
        """See :func:`.mpi_thread.thread_level`."""
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
        self._finish([_until(request)], deadline)
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)

    @_where_mpi_may_be_called
    def measure(self, to: int | None, back: int | None, deadline: float) -> Costs | None:
        """Time messages to the rank ``to`` while ``back`` times those to this one, and then an allreduce. Collective.
        None if there was nothing to measure. Errors: MissingRanksError."""
        trips: list[float] = []
        bursts: list[float] = []
        tasks = [] if to is None else [self._time_messages(to, trips, bursts)]
        self._finish([*tasks, *([] if back is None else [self._answer(back)])], deadline)
        medians = []
        for size, repeats in zip((_SMALL, _LARGE), _REPEATS, strict=True):
            times: list[float] = []
            self._finish([self._time_allreduce(size, repeats, times)], deadline)
            medians.append(statistics.median(times))
        if to is None:
            return None
        latency = statistics.median(trips[1:]) / 2
        burst = max(min(bursts) - latency, 1e-6)
        byte = max(medians[1] - medians[0], 1e-9) / (_LARGE - _SMALL)
        return Costs((latency, _PIECE * _PIECES / burst), medians[0], byte)

    def description(self) -> dict[str, Any]:
        """What the core has to know: the fields of ``hp_mpi``."""
        MPI = self._MPI
        library = mpi_thread.library(MPI)

        def address(name: str) -> int:
            function = getattr(library, f"MPI_{name.capitalize()}", None)
            if function is None and name not in _OPTIONAL:
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
            "byte": handle("BYTE"),
            "in_place": int(MPI.IN_PLACE) % 2**64,
            "dtypes": [handle(name) for name in _DTYPES],
            "ops": [handle(name) for name in _OPS],
            **{name: address(name) for name in _FUNCTIONS},
            "worker": mpi_thread.funnel(),
        }

    def close(self, failed: bool = False) -> None:
        """Give the communicator back, unless the job has failed: MPI may still be busy with it. Idempotent."""
        communicator, self._communicator = self._communicator, None
        if communicator is None or self.level is None or failed:
            return
        with contextlib.suppress(self._MPI.Exception, TimeoutError):
            mpi_thread.run(communicator.Free, seconds=self._patience)

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def _time_messages(
        self, to: int, trips: list[float], bursts: list[float]
    ) -> Generator[None, None, None]:
        communicator = self._communicator
        small, piece = bytearray(1), bytearray(_PIECE)
        for _ in range(_PINGS):
            began = time.perf_counter()
            sent = communicator.Isend(small, to, _PING)
            yield from _until(communicator.Irecv(bytearray(1), to, _ECHO))
            trips.append(time.perf_counter() - began)
            yield from _until(sent)
        for _ in range(2):
            began = time.perf_counter()
            pieces = [communicator.Isend(piece, to, _BURST) for _ in range(_PIECES)]
            yield from _until(communicator.Irecv(bytearray(1), to, _ACK))
            bursts.append(time.perf_counter() - began)
            for sent in pieces:
                yield from _until(sent)

    def _answer(self, back: int) -> Generator[None, None, None]:
        communicator = self._communicator
        buffers = [bytearray(_PIECE) for _ in range(_PIECES)]
        for _ in range(_PINGS):
            yield from _until(communicator.Irecv(buffers[0], back, _PING))
            yield from _until(communicator.Isend(bytearray(1), back, _ECHO))
        for _ in range(2):
            for received in [communicator.Irecv(buffer, back, _BURST) for buffer in buffers]:
                yield from _until(received)
            yield from _until(communicator.Isend(bytearray(1), back, _ACK))

    def _time_allreduce(
        self, size: int, repeats: int, times: list[float]
    ) -> Generator[None, None, None]:
        MPI, buffer = self._MPI, [bytearray(size), self._MPI.FLOAT]
        for _ in range(repeats):
            began = time.perf_counter()
            yield from _until(self._communicator.Iallreduce(MPI.IN_PLACE, buffer, MPI.SUM))
            times.append(time.perf_counter() - began)

    def _finish(self, tasks: Iterable[Generator[None, None, None]], deadline: float) -> None:
        """Run them side by side."""
        running = list(tasks)
        while running:
            running = [task for task in running if next(task, running) is None]
            if running and time.monotonic() > deadline:
                raise MissingRanksError((), "MPI has not connected the ranks in time")
            os.sched_yield()


def _until(request: Any) -> Generator[None, None, None]:
    """Gives way until it has ended."""
    while not request.Test():
        yield


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


def agree(costs: Iterable[Sequence[Any] | None]) -> Costs | None:
    """The medians of what was measured, rounded so that a report of them is exact; None if nothing was."""
    known = [each for each in costs if each is not None]
    if not known:
        return None
    median = statistics.median
    return Costs(
        (
            round(median(each[0][0] for each in known), 7),
            float(round(median(each[0][1] for each in known), -4)),
        ),
        round(median(each[1] for each in known), 7),
        float(f"{median(each[2] for each in known):.3g}"),
    )


def is_faster(speed: Speed, tcp: Speed | None) -> bool:
    """Whether messages of the size in which data travels take less time at this speed than over TCP."""
    if tcp is None:
        return True
    bytes_ = 256 * 1024
    return speed[0] + bytes_ / speed[1] < tcp[0] + bytes_ / tcp[1]
