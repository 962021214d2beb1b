"""What MPI takes: for messages between hosts, and for its own collectives over all ranks of a job.

All that is timed is a generator that gives way while MPI is at work, so that whoever runs it can keep to a deadline,
and run several side by side. Ranks measure once and agree on the medians, and go by these again as long as their
processes live (:meth:`horoplug.mpi.transport.Carrier.known`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple

from horoplug.rendezvous.connections.measure import Speed

Steps = Generator[None, None, None]
"""A measurement: gives way wherever it waits, and puts what it has found into lists."""
Own = tuple[float, float]
"""Seconds that a collective of next to nothing takes, and of each byte more. Bytes are those of the result, or of what
goes in, if that is more."""

_PING, _ECHO, _BURST, _ACK = 11, 12, 13, 14  # tags; the core uses another one
_PINGS = 16
_PIECE = 128 * 1024
_PIECES = 4
_REPEATS = (7, 3)  # of a collective of next to nothing, and of a larger one
_LARGE = 256 * 1024  # bytes


class Costs(NamedTuple):
    """What MPI takes, as all ranks together have measured it."""

    speed: Speed
    """Of messages between hosts."""
    own: tuple[Own, ...]
    """Of MPI's own collectives over all ranks, by the core's numbers of operations."""


def parsed(record: Sequence[Any]) -> Costs:
    """Costs that have been lists on their way from another rank."""
    (latency, bandwidth), own = record
    return Costs((latency, bandwidth), tuple((a, b) for a, b in own))


def agree(records: Iterable[Sequence[Any] | None]) -> Costs | None:
    """The medians of what was measured, rounded so that a report of them is exact; None if nothing was."""
    known = [parsed(record) for record in records if record is not None]
    if not known:
        return None

    def median(values: Iterable[float]) -> float:
        return float(f"{statistics.median(values):.3g}")

    speed = (median(each.speed[0] for each in known), median(each.speed[1] for each in known))
    kinds = zip(*(each.own for each in known), strict=True)
    own = [(median(a for a, _ in kind), median(b for _, b in kind)) for kind in kinds]
    return Costs(speed, tuple(own))


def is_faster(speed: Speed, tcp: Speed | None) -> bool:
    """Whether messages of the size in which data travels take less time at this speed than over TCP."""
    if tcp is None:
        return True
    bytes_ = 256 * 1024
    return speed[0] + bytes_ / speed[1] < tcp[0] + bytes_ / tcp[1]


# ---- messages --------------------------------------------------------------------------------------------------------


def time_messages(communicator: Any, to: int, trips: list[float], bursts: list[float]) -> Steps:
    """Round trips of small messages to a rank that answers, and bursts of large ones."""
    small, piece = bytearray(1), bytearray(_PIECE)
    for _ in range(_PINGS):
        began = time.perf_counter()
        sent = communicator.Isend(small, to, _PING)
        yield from until(communicator.Irecv(bytearray(1), to, _ECHO))
        trips.append(time.perf_counter() - began)
        yield from until(sent)
    for _ in range(2):
        began = time.perf_counter()
        pieces = [communicator.Isend(piece, to, _BURST) for _ in range(_PIECES)]
        yield from until(communicator.Irecv(bytearray(1), to, _ACK))
        bursts.append(time.perf_counter() - began)
        for sent in pieces:
            yield from until(sent)


def answer(communicator: Any, back: int) -> Steps:
    """The other side of :func:`time_messages`."""
    buffers = [bytearray(_PIECE) for _ in range(_PIECES)]
    for _ in range(_PINGS):
        yield from until(communicator.Irecv(buffers[0], back, _PING))
        yield from until(communicator.Isend(bytearray(1), back, _ECHO))
    for _ in range(2):
        for received in [communicator.Irecv(buffer, back, _BURST) for buffer in buffers]:
            yield from until(received)
        yield from until(communicator.Isend(bytearray(1), back, _ACK))


def speed_of(trips: Sequence[float], bursts: Sequence[float]) -> Speed:
    """What follows from the times of :func:`time_messages`."""
    latency = statistics.median(trips[1:]) / 2
    burst = max(min(bursts) - latency, 1e-6)
    return latency, _PIECE * _PIECES / burst


def until(request: Any) -> Steps:
    """Gives way until it has ended."""
    while not request.Test():
        yield


# ---- MPI's own collectives -------------------------------------------------------------------------------------------

_Begin = Callable[[int], Any]  # begins the i-th, and returns the request


def _allreduce(MPI: Any, communicator: Any, part: int) -> _Begin:
    buffer = [bytearray(part * communicator.size), MPI.FLOAT]
    return lambda _: communicator.Iallreduce(MPI.IN_PLACE, buffer, MPI.SUM)


def _allgather(MPI: Any, communicator: Any, part: int) -> _Begin:
    counts = [part] * communicator.size
    buffer = [bytearray(sum(counts)), counts, MPI.BYTE]
    return lambda _: communicator.Iallgatherv(MPI.IN_PLACE, buffer)


def _broadcast(MPI: Any, communicator: Any, part: int) -> _Begin:
    """Each rank is the root by turns, so that none runs ahead of the others."""
    buffer = [bytearray(part * communicator.size), MPI.BYTE]
    return lambda i: communicator.Ibcast(buffer, i % communicator.size)


def _alltoall(MPI: Any, communicator: Any, part: int) -> _Begin:
    counts = [part] * communicator.size
    sent, received = ([bytearray(sum(counts)), counts, MPI.BYTE] for _ in range(2))
    return lambda _: communicator.Ialltoallv(sent, received)


def _reducescatter(MPI: Any, communicator: Any, part: int) -> _Begin:
    sent = [bytearray(part * communicator.size), MPI.FLOAT]
    received = [bytearray(part), MPI.FLOAT]
    counts = [part // 4] * communicator.size
    return lambda _: communicator.Ireduce_scatter(sent, received, counts, MPI.SUM)


def _barrier(MPI: Any, communicator: Any, part: int) -> _Begin:
    return lambda _: communicator.Ibarrier()


# By the core's numbers of operations: each begins one in which every rank has a part of so many bytes, a multiple of 4.
_COLLECTIVES: Final = (*(_allreduce, _allgather, _broadcast, _alltoall, _reducescatter, _barrier),)


def time_collectives(MPI: Any, communicator: Any, own: list[Own]) -> Steps:
    """MPI's own collectives, one after the other."""
    parts = (4, max(_LARGE // communicator.size // 4, 2) * 4)
    for make in _COLLECTIVES:
        medians = []
        for part, repeats in zip(parts, _REPEATS, strict=True):
            begin = make(MPI, communicator, part)
            times = []
            for i in range(repeats):
                began = time.perf_counter()
                yield from until(begin(i))
                times.append(time.perf_counter() - began)
            medians.append(statistics.median(times))
        more = max(medians[1] - medians[0], 0.0)
        own.append((medians[0], more / ((parts[1] - parts[0]) * communicator.size)))
