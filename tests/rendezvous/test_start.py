"""What the connections between many ranks cost, counted in work instead of time."""

import contextlib
import errno
import json
import os
import secrets
import threading

import pytest

from horoplug.base import descriptors
from horoplug.rendezvous.connections import host_hub, peer_connection
from horoplug.rendezvous.connections.connector import Connector
from horoplug.rendezvous.connections.peers import connect_peers
from horoplug.rendezvous.connections.tables import table_of_addresses, table_of_ranks
from horoplug.rendezvous.errors import RendezvousError, StoreTimeoutError
from horoplug.rendezvous.network.auth import Handshake
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer

SECRET = secrets.token_bytes(32)
NEVER = 600.0  # seconds: longer than any test


@contextlib.contextmanager
def outcomes(size, keys=None, **arguments):
    """Connect all ranks in threads; by rank, the connections or an exception."""
    outcome = {}

    def one(rank, client):
        try:
            outcome[rank] = connect_peers(
                rank=rank,
                size=size,
                store=client,
                secret=SECRET,
                key=None if keys is None else keys[rank],
                timeout=NEVER,
                **arguments,
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
            thread.join(120)
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


def test_number_of_handshakes_on_a_host_grows_linearly(monkeypatch):
    made = []

    class Counted(Handshake):
        def __init__(self, *arguments):
            made.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(peer_connection, "Handshake", Counted)
    size = 9
    with connected(size):
        assert len(made) == 2 * (size - 1)  # both ends


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
