"""Connections that are made while the job runs: whoever asks, each two ranks get one connection for each lane."""

import contextlib
import logging
import math
import os
import random
import secrets
import select
import socket
import threading
import time

import pytest

from horoplug.rendezvous.connections import loop, on_demand_connector
from horoplug.rendezvous.connections.on_demand import ConnectionService
from horoplug.rendezvous.connections.on_demand_connector import OnDemandConnector
from horoplug.rendezvous.connections.peer_connection import Identity
from horoplug.rendezvous.connections.sockets import tcp_listener
from tests.harness.descriptors import descriptors
from tests.harness.limits import scaled
from tests.harness.on_demand import NEVER, SECRET, Rank, check_pair, job
from tests.harness.strangers import RefusingServer
from tests.harness.support import seed, until


@pytest.fixture(autouse=True)
def _heard_by_caplog(monkeypatch):
    monkeypatch.setattr(logging.getLogger("horoplug"), "propagate", True)


def is_open(fd):
    with contextlib.suppress(OSError):
        os.fstat(fd)
        return True
    return False


# ---- success ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("streams", [1, 3])
def test_either_rank_may_request_the_connection(asking, encrypt, streams):
    with job(2, streams=streams, encrypt=encrypt) as ranks:
        ranks[asking].request(1 - asking)
        check_pair(*ranks, streams, encrypt)
        ranks[asking].request(1 - asking)  # is ignored
        ranks[1 - asking].request(asking)
        for rank in ranks:
            rank.close()
            assert not rank.engine.failed


def test_requests_and_connections_before_the_start_are_not_lost():
    with job(2, start=False) as ranks:
        ranks[1].request(0)
        ranks[1].start()
        until(lambda: ranks[1].service._connector._outgoing)
        ranks[0].start()
        check_pair(*ranks, 1)


@pytest.mark.parametrize("most", [2, 256])
def test_all_ranks_connect_at_once(most, monkeypatch):
    """All ask for all others in random order, so that many pairs dial each other at the same time."""
    monkeypatch.setattr(on_demand_connector, "_MOST_DIALS", most)
    chance = random.Random(seed())
    for streams in (1, 2):
        with job(7, streams=streams) as ranks:
            for rank in chance.sample(ranks, 7):
                others = [other.number for other in ranks if other is not rank]
                rank.request(*chance.sample(others, 6))
            for i, one in enumerate(ranks):
                for other in ranks[:i]:
                    check_pair(one, other, streams)


@pytest.fixture
def pair(monkeypatch):
    """A function that makes two connectors without threads, whose steps a test chooses, and a list of what they hand
    over: (rank, other rank, lanes)."""
    made, handed_over, failed = [], [], []

    def make(streams=1, timeout=NEVER):
        listeners = [tcp_listener("127.0.0.1", 2) for _ in range(2)]
        for me, listener in enumerate(listeners):
            connector = OnDemandConnector(
                Identity(me, 2, 0, SECRET),
                {1 - me: listeners[1 - me].getsockname()},
                streams,
                timeout,
                lambda rank, lanes, me=me: handed_over.append((me, rank, lanes)),
                lambda rank, reason: failed.append((rank, reason)),
            )
            connector.listen(listener)
            made.append(connector)
        return made, handed_over, failed

    yield make
    for connector in made:
        connector.close()
    for _, _, lanes in handed_over:
        for lane in lanes:
            lane.close()


def step(connector):
    """Handle the events of now."""
    connector._dial_queued()
    connector._run_once(time.monotonic())
    connector._queue.extend(connector._take_due())


def is_idle(connector):
    """Whether a connector has nothing under way."""
    sets = (connector._pending, connector._ready, connector._requests, connector._partial)
    return not any(sets)


def finish(connectors, handed_over, failed):
    """Step all connectors until they are connected."""

    def done():
        for connector in connectors:
            step(connector)
        assert not failed
        return len(handed_over) == 2

    until(done)


def check_lanes(handed_over, streams):
    """Check that both ends have the same lanes."""
    (_, _, near), (_, _, far) = sorted(handed_over, key=lambda each: each[0])
    assert len(near) == len(far) == streams
    for one, other in zip(near, far, strict=True):
        assert one.lane == other.lane
        assert one.sock.getsockname() == other.sock.getpeername()
        assert one.sock.getpeername() == other.sock.getsockname()


def test_two_ranks_that_dial_each_other_get_one_connection(pair):
    """The steps of both ranks are interleaved at random."""
    chance = random.Random(seed())
    for _ in range(60):
        streams = chance.choice([1, 2, 3])
        connectors, handed_over, failed = pair(streams)
        at = {0: chance.randrange(8), 1: chance.randrange(8)}  # the steps at which they ask
        for number in range(40):
            for rank, when in at.items():
                if when == number:
                    connectors[rank].request(1 - rank)
            step(chance.choice(connectors))
        finish(connectors, handed_over, failed)
        check_lanes(handed_over, streams)
        for connector in connectors:
            for _ in range(3):
                step(connector)
            assert is_idle(connector)
            connector.close()
        assert len(handed_over) == 2
        for _, _, lanes in handed_over:
            for lane in lanes:
                lane.close()
        connectors.clear()
        handed_over.clear()


def test_connection_of_the_lower_rank_counts(pair):
    connectors, handed_over, failed = pair()
    for rank, connector in enumerate(connectors):
        connector.request(1 - rank)
        connector._dial_queued()
    finish(connectors, handed_over, failed)
    assert {me: lanes[0].target for me, _, lanes in handed_over} == {0: 1, 1: None}


def test_higher_rank_drops_its_attempt_when_it_has_the_connection_of_the_lower_one(pair):
    """The attempt waits in the backlog of the lower rank, which accepts no connections."""
    connectors, handed_over, failed = pair()
    connectors[0]._selector.unregister(connectors[0]._listeners[0])
    connectors[1].request(0)
    connectors[1]._dial_queued()
    connectors[0].request(1)
    assert connectors[1]._outgoing
    finish(connectors, handed_over, failed)
    assert all(map(is_idle, connectors))


def test_rank_that_connects_again_is_refused():
    """Another process with the number of a rank that is connected waits in vain."""
    with job(2) as ranks:
        ranks[1].request(0)
        check_pair(*ranks, 1)
        addresses = {0: ranks[1].service._connector._addresses[0]}
        again = Rank(1, 2, addresses, tcp_listener("127.0.0.1", 1), timeout=0.3)
        with contextlib.closing(again):
            again.start()
            again.request(0)
            assert "its own connection to this rank has not been com" in again.engine.failure(0)
        check_pair(*ranks, 1)


def test_number_of_attempts_at_once_is_limited(monkeypatch):
    monkeypatch.setattr(on_demand_connector, "_MOST_DIALS", 2)
    with job(6, start=False) as ranks:
        connector = ranks[0].service._connector
        for rank in range(1, 6):
            connector.request(rank)
        connector._dial_queued()
        assert list(connector._outgoing) == [(1, 0), (2, 0)]


def test_idle_service_waits_without_a_timeout():
    with job(2) as ranks:
        ranks[0].request(1)
        check_pair(*ranks, 1)
        for rank in ranks:
            connector = rank.service._connector
            until(lambda connector=connector: connector._next_due() == math.inf)


# ---- strangers -------------------------------------------------------------------------------------------------------


def test_strangers_do_not_disturb(monkeypatch, caplog):
    """Garbage, silence, too many connections, and a process with another secret."""
    monkeypatch.setattr(on_demand_connector, "SPARE_INCOMING", 8)
    monkeypatch.setattr(loop, "_INCOMING_SECONDS", NEVER)  # no time limit applies
    with job(3, start=False) as ranks, contextlib.ExitStack() as stack:
        ranks[0].start()
        address = ranks[1].service._connector._addresses[0]
        for i in range(30):
            sock = stack.enter_context(socket.create_connection(address, timeout=20))
            if i % 3 == 0:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + secrets.token_bytes(100))
            elif i % 3 == 1:
                sock.sendall(b"HPau\x02\x01")
        other = Rank(2, 3, {0: address}, tcp_listener("127.0.0.1", 1), secret=bytes(32))
        stack.callback(other.close)
        other.start()
        other.request(0)
        until(lambda: "does not know this job's secret" in caplog.text)
        ranks[1].start()
        ranks[1].request(0)
        check_pair(ranks[0], ranks[1], 1)
        assert 2 not in ranks[0].engine.added
        assert not ranks[0].engine.failed
    assert "too many connections at once" in caplog.text
    assert "further ones are not logged" in caplog.text


def test_silent_stranger_is_dropped_at_its_deadline(monkeypatch):
    monkeypatch.setattr(loop, "_INCOMING_SECONDS", 0.1)
    with job(2) as ranks:
        address = ranks[1].service._connector._addresses[0]
        with socket.create_connection(address, timeout=20) as sock:
            assert sock.recv(100) == b""


def test_rank_that_is_connected_from_the_start_is_refused():
    """The first rank knows no address of the second one, because they were connected in init()."""
    with job(2) as ranks:
        ranks[0].service._connector._addresses.clear()
        ranks[1].request(0)
        assert "it does not expect a connection from this rank" in ranks[1].engine.failure(0)


def test_rank_retries_when_a_stranger_rejects_it(caplog):
    with RefusingServer(socket.AF_INET, ("127.0.0.1", 0)) as stranger, job(2) as ranks:
        addresses = ranks[0].service._connector._addresses
        right, addresses[1] = addresses[1], stranger.address
        ranks[0].request(1)
        assert stranger.refused.wait(scaled(20))
        addresses[1] = right
        check_pair(*ranks, 1)
    assert "rank 1 refused the connection" in caplog.text


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asking", [0, 1])
def test_rank_that_has_ended_is_named(asking):
    with job(2, timeout=0.3) as ranks:
        ranks[1 - asking].close()
        ranks[asking].request(1 - asking)
        assert "within 0.3 s: Connection refused" in ranks[asking].engine.failure(1 - asking)
        ranks[asking].request(1 - asking)  # is ignored
        ranks[asking].close()
        ranks[asking].engine.failure(1 - asking)


def test_rank_that_does_not_answer_is_named():
    with job(2, start=False, timeout=0.3) as ranks:
        ranks[0].start()
        ranks[0].request(1)
        assert "within 0.3 s: it does not answer" in ranks[0].engine.failure(1)


def test_attempts_without_a_limit_go_on_until_the_rank_listens(monkeypatch):
    refused = threading.Event()
    original = OnDemandConnector._failed

    def failed(connector, key, error):
        refused.set()
        original(connector, key, error)

    monkeypatch.setattr(OnDemandConnector, "_failed", failed)
    with job(1) as ranks, socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        addresses = {0: ranks[0].service._connector._listeners[0].getsockname()}
        one = Rank(1, 2, addresses | {2: late.getsockname()}, tcp_listener("127.0.0.1", 1), 1, -1)
        with contextlib.closing(one):
            one.start()
            one.request(2)
            assert refused.wait(scaled(20))
            late.listen()
            late.setblocking(False)
            two = Rank(2, 3, {1: one.service._connector._listeners[0].getsockname()}, late.dup())
            with contextlib.closing(two):
                one.service._connector._me.size = 3
                two.start()
                (fd,), _ = one.engine.connection(2)
                with socket.socket(fileno=os.dup(fd)) as sock:
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_lanes_of_a_rank_that_does_not_make_all_are_dropped(pair, monkeypatch, caplog):
    monkeypatch.setattr(on_demand_connector, "_GRACE", 0.0)
    connectors, handed_over, failed = pair(streams=2, timeout=0.2)
    connectors[1].request(0)
    connectors[1]._queue.pop()  # the second lane

    def dropped():
        step(connectors[1])
        connectors[0].run_once()
        return "rank 1 has made only some of its connections" in caplog.text

    until(dropped)
    assert is_idle(connectors[0])
    assert handed_over == failed == []


def test_rank_without_free_descriptors_says_what_the_limit_is(monkeypatch):
    with job(2, start=False) as ranks:
        original = OnDemandConnector._dial

        def dial(connector, key):
            if connector._me.rank == 0:
                raise OSError(24, os.strerror(24))
            original(connector, key)

        monkeypatch.setattr(OnDemandConnector, "_dial", dial)
        ranks[0].start()
        ranks[0].request(1)
        assert "Too many open files: this process may open" in ranks[0].engine.failure(1)


def test_error_in_the_thread_fails_requests_of_then_and_later(monkeypatch):
    with job(4) as ranks:
        ranks[1].close()

        def dial(*_):
            raise RuntimeError("an error\nof two lines")

        monkeypatch.setattr(OnDemandConnector, "_dial", dial)
        ranks[0].request(1, 2)
        for other in (1, 2):
            assert "RuntimeError: an error of two lines" in ranks[0].engine.failure(other)
        ranks[0].request(3)
        assert "RuntimeError: an error of two lines" in ranks[0].engine.failure(3)
        thread = ranks[0].service._thread
        ranks[0].close()
        assert not thread.is_alive()


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["made", "started", "asked", "connected", "core has closed"])
def test_closed_service_leaves_no_descriptor_and_no_thread(state):
    before, threads = descriptors(), threading.active_count()
    with job(3, start=state != "made") as ranks:
        if state == "asked":
            ranks[2].service.close()
            ranks[0].request(2)
            until(lambda: ranks[0].service._connector._requests)
        if state == "connected":
            ranks[0].request(1)
            check_pair(*ranks[:2], 1)
        if state == "core has closed":
            for rank in ranks:
                os.close(rank.requests)
                rank.requests = -1
                rank.service._thread.join(scaled(20))
                assert not rank.service._thread.is_alive()
        for rank in ranks:
            rank.close()
            rank.close()
    assert descriptors() == before
    assert threading.active_count() == threads


def test_service_that_finds_no_free_descriptor_leaves_none_open(monkeypatch):
    before = descriptors()

    def refuse(*_):
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr(os, "eventfd", refuse)
    listener = tcp_listener("127.0.0.1", 1)
    with pytest.raises(OSError, match="Too many open files"):
        ConnectionService(listener, Identity(0, 2, 0, SECRET), {1: ("127.0.0.1", 1)}, 1, NEVER)
    assert descriptors() == before


def test_forked_child_keeps_nothing_open():
    """It has neither the listener nor the connections, which would hide the end of its parent from other ranks."""
    with job(2, streams=2) as ranks:
        ranks[0].request(1)
        check_pair(*ranks, 2)
        inherited = [*ranks[0].service._fds, ranks[0].requests, *ranks[0].engine.added[1][0][0]]
        inherited.append(ranks[0].service._connector._listeners[0].fileno())
        before = {fd: os.fstat(fd) for fd in inherited}
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            still_open = b"?"
            with contextlib.suppress(BaseException):
                ranks[0].service.close()
                now = {
                    fd: os.fstat(fd) for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)
                }
                left = [fd for fd in before if fd in now and os.path.samestat(before[fd], now[fd])]
                still_open = repr(left).encode()
            os.write(write, still_open)
            os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            assert select.select([pipe], [], [], 20)[0]
            assert pipe.read() == b"[]"
        os.waitpid(child, 0)
        check_pair(*ranks, 2)  # the parent is not affected
