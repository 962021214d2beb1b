"""Measures how long MPI takes for messages between hosts, and for its own collectives over all ranks of a job.

Each measurement is a generator that yields while MPI requests are pending, so that the caller can keep a deadline and
interleave several measurements. Ranks measure once, agree on the medians, and reuse these for as long as their
processes live (:meth:`horoplug.mpi.transport.MpiTransport.known_costs`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple

from horoplug.base.link_speed import LinkSpeed

Steps = Generator[None, None, None]
"""A measurement in progress: yields wherever it waits, and appends its results to lists."""
CollectiveCost = tuple[float, float]
"""The cost of one collective: seconds for a tiny payload, and seconds per further byte. The payload is the larger one
of input and output."""

_PING, _ECHO, _BURST, _ACK = 11, 12, 13, 14  # tags; the core uses another one
_PINGS = 16
_CHUNK_BYTES = 128 * 1024
_CHUNKS = 4
_REPEATS = (7, 3)  # how often a collective is timed with a tiny payload, and with a large one
_LARGE_BYTES = 256 * 1024


class Costs(NamedTuple):
    """The costs of MPI that all ranks have agreed on."""

    speed: LinkSpeed
    """Latency and bandwidth of messages between hosts."""
    collectives: tuple[CollectiveCost, ...]
    """The costs of MPI's collectives over all ranks, indexed by the core's operation numbers."""


def costs_from_json(record: Sequence[Any]) -> Costs:
    """Costs that another rank sent as JSON, where tuples have become lists."""
    (latency, bandwidth), collectives = record
    return Costs(LinkSpeed(latency, bandwidth), tuple((a, b) for a, b in collectives))


def agree(records: Iterable[Sequence[Any] | None]) -> Costs | None:
    """The medians of the ranks' measurements; None if no rank measured.

    The medians are rounded so that they survive a round trip through JSON exactly."""
    known = [costs_from_json(record) for record in records if record is not None]
    if not known:
        return None

    def median(values: Iterable[float]) -> float:
        return float(f"{statistics.median(values):.3g}")

    speed = LinkSpeed(
        median(each.speed.latency for each in known), median(each.speed.bandwidth for each in known)
    )
    by_operation = zip(*(each.collectives for each in known), strict=True)
    collectives = [(median(a for a, _ in op), median(b for _, b in op)) for op in by_operation]
    return Costs(speed, tuple(collectives))


def is_faster(speed: LinkSpeed, tcp: LinkSpeed | None) -> bool:
    """Whether messages of the size of a data chunk take less time at ``speed`` than over TCP."""
    chunk_bytes = 256 * 1024
    return tcp is None or speed.seconds(chunk_bytes) < tcp.seconds(chunk_bytes)


# ---- messages --------------------------------------------------------------------------------------------------------


def time_messages(communicator: Any, to: int, trips: list[float], bursts: list[float]) -> Steps:
    """Time round trips of small messages to rank ``to``, and bursts of large ones; the peer runs :func:`answer`."""
    small, chunk = bytearray(1), bytearray(_CHUNK_BYTES)
    for _ in range(_PINGS):
        began = time.perf_counter()
        sent = communicator.Isend(small, to, _PING)
        yield from until(communicator.Irecv(bytearray(1), to, _ECHO))
        trips.append(time.perf_counter() - began)
        yield from until(sent)
    for _ in range(2):
        began = time.perf_counter()
        chunks = [communicator.Isend(chunk, to, _BURST) for _ in range(_CHUNKS)]
        yield from until(communicator.Irecv(bytearray(1), to, _ACK))
        bursts.append(time.perf_counter() - began)
        for sent in chunks:
            yield from until(sent)


def answer(communicator: Any, back: int) -> Steps:
    """Answer the messages of a peer that runs :func:`time_messages`."""
    buffers = [bytearray(_CHUNK_BYTES) for _ in range(_CHUNKS)]
    for _ in range(_PINGS):
        yield from until(communicator.Irecv(buffers[0], back, _PING))
        yield from until(communicator.Isend(bytearray(1), back, _ECHO))
    for _ in range(2):
        for received in [communicator.Irecv(buffer, back, _BURST) for buffer in buffers]:
            yield from until(received)
        yield from until(communicator.Isend(bytearray(1), back, _ACK))


def speed_of(trips: Sequence[float], bursts: Sequence[float]) -> LinkSpeed:
    """The link speed that follows from the seconds that :func:`time_messages` measured."""
    latency = statistics.median(trips[1:]) / 2
    burst = max(min(bursts) - latency, 1e-6)
    return LinkSpeed(latency, _CHUNK_BYTES * _CHUNKS / burst)


def until(request: Any) -> Steps:
    """Yield until an MPI request has completed."""
    while not request.Test():
        yield


# ---- MPI's own collectives -------------------------------------------------------------------------------------------

_Begin = Callable[[int], Any]  # starts the i-th repetition and returns its request


def _allreduce(MPI: Any, communicator: Any, part_bytes: int) -> _Begin:
    buffer = [bytearray(part_bytes * communicator.size), MPI.FLOAT]
    return lambda _: communicator.Iallreduce(MPI.IN_PLACE, buffer, MPI.SUM)


def _allgather(MPI: Any, communicator: Any, part_bytes: int) -> _Begin:
    counts = [part_bytes] * communicator.size
    buffer = [bytearray(sum(counts)), counts, MPI.BYTE]
    return lambda _: communicator.Iallgatherv(MPI.IN_PLACE, buffer)


def _broadcast(MPI: Any, communicator: Any, part_bytes: int) -> _Begin:
    """The ranks take turns as root, so that no rank runs ahead of the others."""
    buffer = [bytearray(part_bytes * communicator.size), MPI.BYTE]
    return lambda i: communicator.Ibcast(buffer, i % communicator.size)


def _alltoall(MPI: Any, communicator: Any, part_bytes: int) -> _Begin:
    counts = [part_bytes] * communicator.size
    sent, received = ([bytearray(sum(counts)), counts, MPI.BYTE] for _ in range(2))
    return lambda _: communicator.Ialltoallv(sent, received)


def _reducescatter(MPI: Any, communicator: Any, part_bytes: int) -> _Begin:
    sent = [bytearray(part_bytes * communicator.size), MPI.FLOAT]
    received = [bytearray(part_bytes), MPI.FLOAT]
    counts = [part_bytes // 4] * communicator.size
    return lambda _: communicator.Ireduce_scatter(sent, received, counts, MPI.SUM)


def _barrier(MPI: Any, communicator: Any, part_bytes: int) -> _Begin:
    return lambda _: communicator.Ibarrier()


# Indexed by the core's operation numbers. Every rank contributes a part of ``part_bytes`` bytes, a multiple of 4.
_COLLECTIVES: Final = (*(_allreduce, _allgather, _broadcast, _alltoall, _reducescatter, _barrier),)


def time_collectives(MPI: Any, communicator: Any, costs: list[CollectiveCost]) -> Steps:
    """Time MPI's own collectives one after the other and append the cost of each to ``costs``."""
    sizes = (4, max(_LARGE_BYTES // communicator.size // 4, 2) * 4)
    for make in _COLLECTIVES:
        medians = []
        for part_bytes, repeats in zip(sizes, _REPEATS, strict=True):
            begin = make(MPI, communicator, part_bytes)
            times = []
            for i in range(repeats):
                began = time.perf_counter()
                yield from until(begin(i))
                times.append(time.perf_counter() - began)
            medians.append(statistics.median(times))
        more = max(medians[1] - medians[0], 0.0)
        costs.append((medians[0], more / ((sizes[1] - sizes[0]) * communicator.size)))
