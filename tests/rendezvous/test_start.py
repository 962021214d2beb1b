"""What the connections between many ranks cost, counted in work instead of time."""

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
import types

import pytest

from horoplug.base import descriptors
from horoplug.rendezvous.connections import host_hub, peer_connection
from horoplug.rendezvous.connections.connector import Connector
from horoplug.rendezvous.connections.neighbours import neighbours
from horoplug.rendezvous.connections.peers import connect_peers
from horoplug.rendezvous.connections.tables import table_of_addresses, table_of_ranks
from horoplug.rendezvous.errors import RendezvousError, StoreTimeoutError
from horoplug.rendezvous.network.auth import Handshake
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer
from tests.harness.limits import scaled
from tests.harness.on_demand import RecordingEngine, check_pair, request

SECRET = secrets.token_bytes(32)
NEVER = 600.0  # seconds: longer than any test


@contextlib.contextmanager
def outcomes(size, keys=None, **arguments):
    """Connect all ranks in threads; by rank, the connections or an exception. ``arguments`` by name: value or
    {rank: value}."""
    outcome = {}

    def one(rank, client):
        own = {
            name: value[rank] if isinstance(value, dict) else value
            for name, value in arguments.items()
        }
        try:
            outcome[rank] = connect_peers(
                rank=rank,
                size=size,
                store=client,
                secret=SECRET,
                key=None if keys is None else keys[rank],
                timeout=NEVER,
                **own,
            )
        except BaseException as error:
            outcome[rank] = error

    with StoreServer(SECRET) as server, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(StoreClient.connect(*server.address, SECRET, 60.0))
            for _ in range(size)
        ]
        threads = [
            threading.Thread(target=one, args=pair, daemon=True) for pair in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scaled(120))
            assert not thread.is_alive()
        try:
            yield outcome
        finally:
            for connections in outcome.values():
                if not isinstance(connections, BaseException):
                    connections.close()


@contextlib.contextmanager
def connected(size, keys=None, **arguments):
    """The connections of all ranks."""
    with outcomes(size, keys, **arguments) as outcome:
        errors = [error for error in outcome.values() if isinstance(error, BaseException)]
        assert not errors, errors
        yield [outcome[rank] for rank in range(size)]


@pytest.mark.parametrize("hosts", [1, 3])
def test_ranks_ask_for_a_number_of_keys_that_grows_linearly(hosts, monkeypatch):
    """Only rank 0 reads the records of all ranks; the others read a table."""
    asked = []
    original = StoreClient.begin_get

    def spy(client, keys, *arguments):
        asked.append(len(keys))
        return original(client, keys, *arguments)

    monkeypatch.setattr(StoreClient, "begin_get", spy)
    size = 12
    with connected(size, {rank: f"h{rank % hosts}" for rank in range(size)}):
        assert sum(asked) <= (5 if hosts == 1 else 10) * size
        assert len(asked) <= 6 * size


def test_table_has_few_bytes_for_each_rank():
    ranks = {
        r: {"host": f"{'k' * 60}/{r // 8}", "unix": "n" * 33, "processors": list(range(64))}
        for r in range(1024)
    }
    addresses = {r: {"address": f"10.0.0.{r // 8}", "port": 40000 + r} for r in range(1024)}
    assert len(json.dumps(table_of_ranks(ranks))) < 20 * 1024
    assert len(json.dumps(table_of_addresses(addresses))) < 20 * 1024


@pytest.fixture
def handshakes(monkeypatch):
    """The arguments of the handshakes of this process, of which each connection has two, one for each end."""
    made = []

    class Counted(Handshake):
        def __init__(self, *arguments):
            made.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(peer_connection, "Handshake", Counted)
    return made


def test_number_of_handshakes_on_a_host_grows_linearly(handshakes):
    size = 9
    with connected(size):
        assert len(handshakes) == 2 * (size - 1)


def test_rank_that_may_not_open_enough_files_says_how_many_it_needs(monkeypatch):
    monkeypatch.setattr(descriptors, "limit", lambda: 40)
    with outcomes(3) as outcome:
        assert all(isinstance(error, RendezvousError) for error in outcome.values()), outcome
        assert any(
            "open files for its connections to 2 ranks, but this process may open" in str(error)
            for error in outcome.values()
        )


def test_hub_without_free_descriptors_says_what_the_limit_is(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(host_hub.Hub, "_make_pairs", refuse)
    with outcomes(3) as outcome:
        assert all(isinstance(error, RendezvousError) for error in outcome.values()), outcome
        assert all(
            "Too many open files: this process may open" in str(error) for error in outcome.values()
        )


def test_rank_that_does_not_connect_is_named_and_not_those_that_wait_for_it(monkeypatch):
    """Rank 2 never connects to the hub, so that rank 0 cannot connect ranks 1 and 2."""
    original_dial, original_run = Connector._dial, Connector.run_once

    def dial(connector, key):
        if connector._me.rank != 2:
            original_dial(connector, key)

    def run_once(connector, store):
        if connector._me.rank == 0 and connector.missing == [2]:
            raise StoreTimeoutError([0, 1], "the deadline has passed")
        original_run(connector, store)

    monkeypatch.setattr(Connector, "_dial", dial)
    monkeypatch.setattr(Connector, "run_once", run_once)
    with outcomes(3) as outcome:
        assert "rank 2 did not connect within 600 s (rank 0 has waited" in str(outcome[0])
        assert all("rank 2 did not connect" in str(error) for error in outcome.values())


# ---- large jobs ------------------------------------------------------------------------------------------------------

HOSTS = [0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5]
"""The host of each rank. Some ranks have a rank on another host that is not their neighbour."""
KEYS = {rank: f"h{host}" for rank, host in enumerate(HOSTS)}
LARGE = {"connect_all": len(HOSTS) - 1, "data_timeout": NEVER}


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("streams", [1, 2])
def test_large_job_connects_neighbours_first_and_other_ranks_on_demand(streams, encrypt):
    with connected(len(HOSTS), KEYS, streams=streams, encrypt=encrypt, **LARGE) as ranks:
        later = {}
        for rank, connections in enumerate(ranks):
            first = neighbours(rank, HOSTS)
            later[rank] = []
            for other, host, stream, segment, doorbell in connections.peers:
                here = host == HOSTS[rank]
                assert (stream >= 0) == (here or other in first)
                assert (segment >= 0) == (doorbell >= 0) == here
                if not here:
                    lanes = connections.lanes[other]
                    assert len(lanes) == streams - 1
                    assert all((lane >= 0) == (other in first) for lane in lanes)
                if stream < 0:
                    later[rank].append(other)
            assert set(connections.keys) == (first if encrypt else set())
            assert (connections.service is not None) == bool(later[rank])
            assert min(connections.streams) >= 0
        assert sum(map(len, later.values())) > 20
        with contextlib.ExitStack() as stack:
            started = {}
            for rank, others in later.items():
                if others:
                    engine, service = RecordingEngine(), ranks[rank].service
                    stack.callback(engine.close)
                    requests = service.take_request_fd()
                    stack.callback(os.close, requests)
                    service.start(engine)
                    request(requests, others)
                    started[rank] = types.SimpleNamespace(number=rank, engine=engine)
            for rank, others in later.items():
                for other in others:
                    check_pair(started[rank], started[other], streams, encrypt)


def test_number_of_handshakes_between_hosts_grows_with_the_neighbours(handshakes):
    size = 24
    with connected(size, {rank: f"h{rank}" for rank in range(size)}, connect_all=0):
        assert len(handshakes) == sum(len(neighbours(rank, range(size))) for rank in range(size))
        assert len(handshakes) < size * (size - 1) / 1.5


def test_engine_of_a_large_job_gets_the_socket_for_requests():
    with connected(len(HOSTS), KEYS, encrypt=True, **LARGE) as ranks:
        arguments = ranks[1].release()
        assert "libcrypto" in arguments
        assert arguments["libcrypto"] is not None
        request(arguments["connection_requests"], [10])
        os.close(arguments["connection_requests"])
        for fd in (arguments["segment_fd"], arguments["doorbell_fd"], *ranks[1].streams):
            os.close(fd)
        for fd in (fd for peer in ranks[1].peers for fd in peer[3:] if fd >= 0):
            os.close(fd)


@pytest.mark.parametrize("connect_all", [3, 64])
def test_small_job_connects_all_ranks(connect_all):
    with connected(3, {0: "a", 1: "b", 2: "c"}, connect_all=connect_all) as ranks:
        for connections in ranks:
            assert connections.service is None
            assert all(peer[2] >= 0 for peer in connections.peers)


def test_different_settings_of_connections_on_demand_are_refused():
    with outcomes(2, {0: "a", 1: "b"}, connect_all={0: 2, 1: 1}) as outcome:
        assert all(isinstance(error, RendezvousError) for error in outcome.values()), outcome
        assert any(
            "rank 1 connects every two ranks in jobs of up to 1 ranks, rank 0 in those of up to 2; "
            "set HOROPLUG_CONNECT_ALL alike on every rank" in str(error)
            for error in outcome.values()
        )


def test_large_job_is_told_that_all_connections_would_exceed_the_limit(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("horoplug"), "propagate", True)
    caplog.set_level(logging.INFO, "horoplug")

    def limit():
        """Enough for 7 ranks on other hosts."""
        return len(os.listdir("/proc/self/fd")) + host_hub.HUB_DESCRIPTORS + 64 * 7

    monkeypatch.setattr(descriptors, "limit", limit)
    with connected(len(HOSTS), KEYS, streams=64, connect_all=0):
        assert (
            "open files for its connections to 10 ranks, but this process may open" in caplog.text
        )
