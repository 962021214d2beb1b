"""Measurement of latency and bandwidth between hosts."""

import json
import socket
import threading
import time
import types

import pytest

from horoplug.base.link_speed import LinkSpeed
from horoplug.mpi import measure as mpi_measure
from horoplug.rendezvous.connections import data_transport, measure
from horoplug.rendezvous.connections.measure import Measurement, agree
from tests.harness.limits import scaled


def pairs(count):
    """Nonblocking connections by (from, to)."""
    ends = [socket.socketpair() for _ in range(count)]
    for pair in ends:
        for sock in pair:
            sock.setblocking(False)
    return ends


def run_all(arguments, deadline=20.0):
    """Run one measurement per rank at the same time. Returns the results by rank."""
    results = [None] * len(arguments)

    def one(rank):
        try:
            results[rank] = Measurement(*arguments[rank]).run(time.monotonic() + deadline)
        except OSError as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(len(arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(60))
        assert not thread.is_alive()
    return results


def nothing_left(ends):
    sockets = [sock for pair in ends for sock in pair]
    for sock in sockets:
        with pytest.raises(BlockingIOError):
            sock.recv(1)
    for sock in sockets:
        sock.close()


def plausible(speed):
    latency, bandwidth = speed
    return 0 < latency < 20 and 1e3 < bandwidth < 1e12


def test_two_ranks_share_a_connection():
    ends = pairs(1)
    (one, other) = ends[0]
    results = run_all([(one, one), (other, other)])
    assert all(map(plausible, results))
    nothing_left(ends)


@pytest.mark.parametrize("ranks", [3, 5])
def test_measurement_around_a_ring(ranks):
    ends = pairs(ranks)  # rank r has the first end of pair r, the next rank has the second
    results = run_all([(ends[r][0], ends[r - 1][1]) for r in range(ranks)])
    assert all(map(plausible, results))
    nothing_left(ends)


def test_measurement_along_a_chain():
    """Neighbours on one host do not measure."""
    ends = pairs(1)
    results = run_all([(ends[0][0], None), (None, ends[0][1]), (None, None)])
    assert plausible(results[0])
    assert results[1:] == [None, None]
    nothing_left(ends)


def test_lost_rank_ends_the_measurement():
    ends = pairs(1)
    ends[0][1].close()
    assert run_all([(ends[0][0], ends[0][0])]) == [None]
    ends[0][0].close()


@pytest.mark.parametrize("ranks", [3, 5])
def test_neighbours_of_a_lost_rank_measure_their_other_links(ranks):
    """Rank 1 has ended. The connections between the other ranks stay usable: a closed one would make their ranks blame
    each other for the end of the job."""
    ends = pairs(ranks)
    for sock in (ends[1][0], ends[0][1]):  # those of rank 1
        sock.close()
    survivors = [rank for rank in range(ranks) if rank != 1]
    results = run_all([(ends[r][0], ends[r - 1][1]) for r in survivors])
    assert results[0] is None
    assert all(map(plausible, results[1:]))
    nothing_left(ends[2:])
    for sock in (ends[0][0], ends[1][1]):
        sock.close()


def test_unresponsive_rank_ends_the_measurement_in_time():
    ends = pairs(1)
    assert isinstance(run_all([(ends[0][0], ends[0][0])], deadline=0.05)[0], TimeoutError)
    for sock in ends[0]:
        sock.close()


def test_ranks_agree_on_the_median_link():
    assert agree([None, None]) is None
    assert agree([None, (2e-5, 1e8)]) == (2e-5, 1e8)
    assert agree([(1e-5, 3e8), (9e-5, 1e8), (2e-5, 2e8), None]) == (2e-5, 2e8)
    assert agree([[1.23456789e-5, 123456789.0]]) == (1.23e-5, 123460000.0)
    assert measure._PINGS > 1  # the first one is discarded


# ---- MPI beside TCP --------------------------------------------------------------------------------------------------


def test_ranks_agree_on_mpi():
    assert mpi_measure.agree([None, None]) is None
    reports = [
        [[1e-5, 3e8], [[4e-5, 1e-9], [7e-5, 0.0]]],  # lists, as in JSON
        None,
        mpi_measure.Costs(LinkSpeed(9e-5, 1e8), ((6e-5, 3e-9), (8e-5, 0.0))),
        mpi_measure.Costs(LinkSpeed(2e-5, 2e8), ((5e-5, 2.34567e-9), (6e-5, 0.0))),
    ]
    agreed = mpi_measure.agree(reports)
    assert agreed == mpi_measure.Costs(LinkSpeed(2e-5, 2e8), ((5e-5, 2.35e-9), (7e-5, 0.0)))
    assert mpi_measure.costs_from_json(json.loads(json.dumps(agreed))) == agreed


def test_faster_transport_is_chosen_for_data():
    """The comparison uses the size of a data chunk, not of the shortest message."""
    tcp = LinkSpeed(2e-5, 1e9)
    assert mpi_measure.is_faster(tcp, None)
    assert mpi_measure.is_faster(LinkSpeed(1e-5, 1e9), tcp)
    assert mpi_measure.is_faster(LinkSpeed(3e-5, 2e9), tcp)
    assert not mpi_measure.is_faster(LinkSpeed(3e-5, 1e9), tcp)
    assert not mpi_measure.is_faster(LinkSpeed(1e-5, 5e8), tcp)


class Streams:
    """The connections of a rank, by rank."""

    def __init__(self, **streams):
        self.streams = {int(name[1:]): sock for name, sock in streams.items()}

    def stream(self, rank):
        return self.streams[rank]


def test_rank_that_gives_up_does_not_keep_its_neighbours_waiting():
    (to_0, rank_0), (to_1, rank_1) = pairs(2)
    records = types.SimpleNamespace(rank=2, deadline=time.monotonic() + 0.05)
    choice = data_transport._Choice(records, [0, 0, 1], None)
    assert choice._measure_tcp(Streams(r0=to_0, r1=to_1)) is None
    for neighbour in (rank_0, rank_1):
        neighbour.settimeout(20)
        while neighbour.recv(4096):
            pass
    for sock in (to_0, rank_0, to_1, rank_1):
        sock.close()
