"""The connections between ranks: either every pair of ranks is connected, or every rank gets an error that names the
cause."""

import contextlib
import json
import logging
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from horoplug._native import version
from horoplug.common.errors import HorovodInternalError
from horoplug.rendezvous.connections import connector as connect_module
from horoplug.rendezvous.connections import loop as loop_module
from horoplug.rendezvous.connections.peer_connection import (
    Identity,
    PeerConnection,
    Stage,
    listener_context,
)
from horoplug.rendezvous.connections.peers import connect_peers
from horoplug.rendezvous.connections.sockets import tcp_listener, unix_listener
from horoplug.rendezvous.connections.tables import table_of_ranks
from horoplug.rendezvous.errors import (
    AuthenticationError,
    MissingRanksError,
    PeerLostError,
    ProtocolError,
    RankTakenError,
    RendezvousError,
)
from horoplug.rendezvous.network.auth import Handshake, Role
from horoplug.rendezvous.network.host_token import HostToken
from horoplug.rendezvous.network.interfaces import interface_address
from horoplug.rendezvous.network.topology import host_key, topology
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer
from tests.harness import ROOT, program_text
from tests.harness.descriptors import descriptors
from tests.harness.limits import scaled
from tests.harness.strangers import RefusingServer
from tests.harness.support import until

SECRET = secrets.token_bytes(32)
RECORD = {"version": version()}
NEVER = 600.0  # seconds: longer than any test


@pytest.fixture(autouse=True)
def _heard_by_caplog(monkeypatch):
    monkeypatch.setattr(logging.getLogger("horoplug"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("horoplug"), "level", logging.NOTSET)


def closes_down_to(count):
    """Wait until this process has so many descriptors. Threads close some of them, such as the host token's."""
    until(lambda: descriptors() == count)


@pytest.fixture
def server():
    with StoreServer(SECRET) as running:
        yield running


@pytest.fixture
def stores(server):
    with contextlib.ExitStack() as stack:
        yield lambda count: [
            stack.enter_context(StoreClient.connect(*server.address, SECRET, 5.0))
            for _ in range(count)
        ]


def build_all(clients, ranks=None, **changes):
    """Connect some ranks, in threads. Returns by rank the connections or an exception. ``changes`` by name: value or
    {rank: value}.

    By default the timeout exceeds that of the test, so that no error is caused by it."""
    ranks = list(range(len(clients))) if ranks is None else ranks
    outcome = {}

    def one(rank, client):
        arguments = {"rank": rank, "size": len(clients), "store": client, "secret": SECRET}
        arguments["timeout"] = NEVER
        for name, value in changes.items():
            if not isinstance(value, dict):
                arguments[name] = value
            elif rank in value:
                arguments[name] = value[rank]
        try:
            outcome[rank] = connect_peers(**arguments)
        except BaseException as error:
            outcome[rank] = error

    threads = [
        threading.Thread(target=one, args=pair, daemon=True)
        for pair in zip(ranks, clients, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(60))
        assert not thread.is_alive()
    return outcome


def close_all(outcome):
    for connections in outcome.values():
        if not isinstance(connections, BaseException):
            connections.close()


def check(by_rank):
    """Check every pair's connection: the kind of socket, and between ranks of one host the memory and the doorbell."""
    for rank, connections in by_rank.items():
        assert [peer[0] for peer in connections.peers] == [r for r in by_rank if r != rank]
        for other, host, stream, segment, doorbell in connections.peers:
            assert host == connections.hosts[other]
            assert not os.get_blocking(stream)
            same = host == connections.host
            assert (segment >= 0) == (doorbell >= 0) == same
            with socket.socket(fileno=os.dup(stream)) as sock:
                assert (sock.family == socket.AF_UNIX) == same
                sock.sendall(f"{rank} to {other}".encode())
            if same:
                theirs = by_rank[other]
                assert os.path.sameopenfile(segment, theirs.segment_fd)
                assert os.fstat(segment).st_size == 0
                os.eventfd_write(doorbell, 1)
            lanes = connections.lanes.get(other, [])
            for lane in lanes:
                assert not os.get_blocking(lane)
                with socket.socket(fileno=os.dup(lane)) as sock:
                    assert sock.family != socket.AF_UNIX
                    sock.sendall(f"{rank} to {other}, {lanes.index(lane)}".encode())
            for fd in (stream, segment, doorbell, *lanes):
                assert fd < 0 or not os.get_inheritable(fd)
    for rank, connections in by_rank.items():
        local = sum(host == connections.host for host in connections.hosts)
        assert connections.local_size == local
        if local > 1:
            assert os.eventfd_read(connections.doorbell_fd) == local - 1
            assert not os.get_inheritable(connections.segment_fd)
        else:
            assert (connections.segment_fd, connections.doorbell_fd) == (-1, -1)
        for other, _, stream, _, _ in connections.peers:
            with socket.socket(fileno=os.dup(stream)) as sock:
                sock.settimeout(5)
                assert sock.recv(100) == f"{other} to {rank}".encode()
                os.set_blocking(stream, False)
            for i, lane in enumerate(connections.lanes.get(other, [])):
                with socket.socket(fileno=os.dup(lane)) as sock:
                    sock.settimeout(5)
                    assert sock.recv(100) == f"{other} to {rank}, {i}".encode()
                    os.set_blocking(lane, False)


# ---- success ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("hosts", [1, 2, 3, 8])
@pytest.mark.short("*2*")
def test_every_pair_is_connected(stores, size, hosts):
    before = descriptors()
    clients = stores(size)
    opened = descriptors()
    by_rank = build_all(clients, key={rank: f"h{rank % hosts}" for rank in range(size)})
    check(dict(sorted(by_rank.items())))
    for rank, connections in by_rank.items():
        assert connections.hosts == [r % hosts for r in range(size)]
        assert (connections.rank, connections.size) == (rank, size)
    if size == 1:
        closes_down_to(opened)
    close_all(by_rank)
    assert opened > before
    closes_down_to(opened)


def test_one_rank_opens_no_connections():
    before = descriptors()
    connections = connect_peers(rank=0, size=1, store=None, secret=None)
    closes_down_to(before)
    assert connections.peers == []
    assert (connections.segment_fd, connections.doorbell_fd) == (-1, -1)
    assert (
        connections.local_rank,
        connections.local_size,
        connections.cross_rank,
        connections.cross_size,
    ) == (0, 1, 0, 1)
    assert connections.is_homogeneous


def test_topology_of_ranks_and_hosts():
    keys = ["b", "a", "b", "c", "a", "b"]
    views = [topology(rank, keys) for rank in range(6)]
    assert all(view.hosts == [0, 1, 0, 2, 1, 0] for view in views)
    assert [v.local_rank for v in views] == [0, 0, 1, 0, 1, 2]
    assert [v.local_size for v in views] == [3, 2, 3, 1, 2, 3]
    assert [v.cross_rank for v in views] == [0, 1, 0, 2, 1, 0]
    assert [v.cross_size for v in views] == [3, 3, 2, 3, 2, 1]
    assert not views[0].is_homogeneous
    assert topology(1, ["x", "y"]).is_homogeneous


def test_host_key_is_the_same_on_one_host():
    assert host_key() == host_key(None) == host_key("")
    assert host_key("a") != host_key("b")


def test_interface_address_is_chosen():
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"HOROVOD_GLOO_IFACE='nonesuch0' .*there are .*lo"):
        interface_address("nonesuch0")


def test_no_tcp_listener_on_one_host(stores, monkeypatch):
    def refuse(*_):
        raise AssertionError("a TCP listener on a job of one host")

    monkeypatch.setattr("horoplug.rendezvous.connections.peers.tcp_listener", refuse)
    by_rank = build_all(stores(3))
    check(dict(sorted(by_rank.items())))
    close_all(by_rank)


def test_tcp_listeners_and_socket_options(stores, monkeypatch):
    addresses = []

    def spy(address, size):
        addresses.append(address)
        return tcp_listener(address, size)

    monkeypatch.setattr("horoplug.rendezvous.connections.peers.tcp_listener", spy)
    by_rank = build_all(stores(2), key={0: "a", 1: "b"}, interface={0: "lo"}, data_timeout=12.0)
    assert addresses == ["127.0.0.1"] * 2
    for connections in by_rank.values():
        with socket.socket(fileno=os.dup(connections.peers[0][2])) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12000
    close_all(by_rank)


@pytest.mark.parametrize("streams", [1, 4])
def test_several_connections_between_hosts(stores, streams):
    clients = stores(4)
    before = descriptors()
    by_rank = build_all(clients, key={0: "a", 1: "b", 2: "a", 3: "c"}, streams=streams)
    assert not any(isinstance(connections, BaseException) for connections in by_rank.values()), (
        by_rank
    )
    check(dict(sorted(by_rank.items())))
    for connections in by_rank.values():
        remote = [peer[0] for peer in connections.peers if peer[1] != connections.host]
        assert sorted(connections.lanes) == remote
        assert all(len(fds) == streams - 1 for fds in connections.lanes.values())
        assert (
            len(connections.streams)
            == len(set(connections.streams))
            == 3 + len(remote) * (streams - 1)
        )
    close_all(by_rank)
    closes_down_to(before)


def test_different_connection_counts_are_refused(stores):
    outcome = build_all(stores(2), key={0: "a", 1: "b"}, streams={0: 2, 1: 3})
    assert all(isinstance(error, RendezvousError) for error in outcome.values())
    assert "rank 1 wants 3 connections between hosts, rank 0 2" in str(outcome[0])


def test_wrong_secret_on_an_additional_connection_is_refused(stores, monkeypatch):
    """Every connection is authenticated separately."""
    original = connect_module.Connector._dial

    def dial(connector, key):
        me = connector._me
        if key == (0, 2):
            connector._me = Identity(me.rank, me.size, me.generation, bytes(32))
        original(connector, key)
        connector._me = me

    monkeypatch.setattr(connect_module.Connector, "_dial", dial)
    clients = stores(2)
    before = descriptors()
    outcome = build_all(clients, key={0: "a", 1: "b"}, streams=3, timeout={0: NEVER, 1: 1.0})
    assert isinstance(outcome[1], AuthenticationError)
    assert "does not know this job's secret" in str(outcome[1])
    assert isinstance(outcome[0], PeerLostError)
    closes_down_to(before)


def test_released_descriptors_are_not_closed(stores):
    by_rank = build_all(stores(2))
    arguments = by_rank[0].release()
    assert set(arguments) == {
        "rank",
        "size",
        "host",
        "peers",
        "segment_fd",
        "doorbell_fd",
        "lanes",
        "link_latency",
        "link_bandwidth",
        "mpi",
        "processor_quota",
        "libcrypto",
        "keys",
    }
    by_rank[0].close()
    fds = [arguments["segment_fd"], arguments["doorbell_fd"], *arguments["peers"][0][2:]]
    for fd in fds:
        os.fstat(fd)
        os.close(fd)
    by_rank[1].close()
    by_rank[1].close()


def test_repeated_connections_leak_nothing(server, stores):
    clients = stores(3)
    before, threads = descriptors(), threading.active_count()
    for generation in range(100):
        keys = {0: "a", 1: "a", 2: "b" if generation % 10 == 0 else "a"}
        by_rank = build_all(clients, generation=generation, key=keys)
        assert all(
            not isinstance(connections, BaseException) for connections in by_rank.values()
        ), by_rank
        close_all(by_rank)
    closes_down_to(before)
    assert threading.active_count() == threads
    generations = {key.split(b"/")[0] for key in server._state._values}
    assert len(generations) <= 3  # old keys are removed


WORKER = program_text("tests/rendezvous/programs/connections_worker.py")


def start_worker(server_address, rank, size, generations=1, **env):
    full = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server_address[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server_address[1]),
        "HOROPLUG_SECRET_KEY": SECRET.hex(),
        **env,
    }
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(generations)],
        env=full,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextlib.contextmanager
def workers(processes):
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def finish(process):
    out, err = process.communicate(timeout=scaled(60))
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.parametrize("mode", ["launcher", "rank0"])
@pytest.mark.parametrize(("size", "hosts"), [(1, 1), (2, 1), (4, 2), (8, 1)])
def test_processes_connect_to_each_other(server, mode, size, hosts):
    address = server.address
    env = {}
    if mode == "rank0":
        with socket.create_server(("127.0.0.1", 0)) as placeholder:
            address = placeholder.getsockname()
        env = {"HOROPLUG_RENDEZVOUS_SERVER": "rank0"}
    started = [
        start_worker(address, rank, size, 3, HOROPLUG_HOST_KEY=f"h{rank % hosts}", **env)
        for rank in reversed(range(size))
    ]
    with workers(started):
        # If rank 0 serves the store, it may end first: the others have their connections and need not say goodbye.
        results = [finish(process) for process in started]
    assert sorted(r["rank"] for r in results) == list(range(size))
    assert all(r["hosts"] == [x % min(hosts, size) for x in range(size)] for r in results)
    assert max(r["fds"] for r in results) <= 5  # stdin, stdout, stderr, /proc/self/fd; one to spare


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.short(failure=True)
def test_missing_ranks_are_named(stores):
    before = descriptors()
    clients = stores(2)
    opened = descriptors()
    outcome = build_all(clients, [0, 3], size=5, timeout=0.3)
    for error in outcome.values():
        # The rank that times out first notifies the other, possibly before that one's own timeout.
        assert isinstance(error, (MissingRanksError, PeerLostError))
        assert "ranks [1, 2, 4] did not connect within 0.3 s" in str(error)
    assert opened > before
    closes_down_to(opened)


def test_single_missing_rank_is_named(stores):
    (error,) = build_all(stores(1), [1], size=2, timeout=0.05).values()
    assert isinstance(error, MissingRanksError)
    assert isinstance(error, TimeoutError)
    assert str(error).startswith("rank 0 did not connect within 0.05 s")
    assert error.ranks == (0,)


def test_rank_that_dies_before_connecting_is_named_at_once(server):
    env = {"HOROVOD_START_TIMEOUT": str(NEVER)}
    started = [start_worker(server.address, rank, 3, **env) for rank in (0, 1)]
    with workers(started) as (first, second):
        until(lambda: 1 in server._state._sessions, 60)
        second.send_signal(signal.SIGKILL)
        _, err = first.communicate(timeout=scaled(60))
    assert "PeerLostError: rank 1 (pid" in err


@pytest.fixture
def on_this_host():
    """A function that returns a rank's host as its record in generation 0 has it, with this host's token."""
    with HostToken(SECRET, "0/", 10) as token:
        yield lambda key: f"{key}/{token.value}"


@pytest.mark.short(failure=True)
def test_rank_that_dies_while_connecting_is_named_at_once(stores, monkeypatch, on_this_host):
    """Rank 1 publishes its record, so that rank 0 waits for it on its listener, and then dies."""
    zero, one = stores(2)
    before = descriptors()
    one.register(1)
    record = RECORD | {"size": 2, "host": on_this_host("h"), "unix": "nobody-listens-here"}
    assert one.claim("0/rank/1", json.dumps(record).encode())
    original = connect_module.Connector.run_once

    def lose_rank_1(connector, store):
        assert connector.missing == [1]
        one._sock.close()
        original(connector, store)

    monkeypatch.setattr(connect_module.Connector, "run_once", lose_rank_1)
    (error,) = build_all([zero], [0], size=2, key="h").values()
    assert isinstance(error, PeerLostError)
    assert isinstance(error, HorovodInternalError)
    assert error.rank == 1
    assert descriptors() == before - 2  # rank 1's socket and the server's end of it are closed


def test_loss_of_a_rank_reaches_ranks_that_do_not_wait_for_it(stores):
    """Rank 2 gives up because rank 0 died. Rank 1 needs nothing more from rank 0 and waits for rank 2's address."""
    zero, one, two = stores(3)
    keys = {1: "a", 2: "b"}
    zero.register(0)
    record = RECORD | {"size": 3, "host": "a", "unix": "nobody-listens-here"}
    assert zero.claim("0/rank/0", json.dumps(record).encode())
    zero._sock.close()
    for rank, client in ((2, two), (1, one)):
        (error,) = build_all([client], [rank], size=3, key=keys[rank]).values()
        assert isinstance(error, PeerLostError)
        assert error.rank == 0
        assert "rank 0 (pid" in str(error)


def test_unreachable_rank_is_named(stores, on_this_host):
    zero, one = stores(2)
    zero.register(0)
    record = RECORD | {"size": 2, "host": on_this_host("h"), "unix": "nobody-listens-here"}
    zero.set("0/rank/0", json.dumps(record).encode())
    records = {rank: record | {"nonce": "0" * 64} for rank in range(2)}
    zero.set("0/rank/table", json.dumps(table_of_ranks(records)).encode())
    (error,) = build_all([one], [1], size=2, key="h").values()
    assert isinstance(error, PeerLostError)
    assert "rank 0 cannot be connected to: Connection refused" in str(error)


def test_failure_of_one_rank_fails_all(stores):
    """One rank has an invalid interface, and the others do not wait for it."""
    keys = {0: "a", 1: "b", 2: "b"}
    outcome = build_all(stores(3), key=keys, interface={2: "nonesuch0"})
    assert isinstance(outcome[2], ValueError)
    for rank in (0, 1):
        assert isinstance(outcome[rank], PeerLostError)
        assert "rank 2 gave up: ValueError" in str(outcome[rank])


def test_duplicate_rank_is_refused(stores):
    first, second, third = stores(3)
    first.register(1)
    (error,) = build_all([second], [1], size=3).values()
    assert isinstance(error, RankTakenError)
    assert f"rank 1 of this job is already taken by another process (pid {os.getpid()}" in str(
        error
    )
    # The process that registered the rank first is not affected.
    outcome = build_all([third, first], [0, 1], size=2)
    check(outcome)
    close_all(outcome)


def test_different_job_sizes_are_refused(stores):
    outcome = build_all(stores(3), size={0: 2, 1: 3, 2: 3})
    assert all(isinstance(error, RendezvousError) for error in outcome.values())
    # Rank 0 either reads the record of rank 1 or 2 itself or hears from the one that has read its record.
    own = "rank [12] was started with a size of 3, rank 0 with 2"
    heard = "rank 0 was started with a size of 2, rank [12] with 3"
    assert re.search(f"{own}|{heard}", str(outcome[0]))
    assert all("was started with a size of" in str(error) for error in outcome.values())


@pytest.mark.parametrize("theirs", [{"version": "9.9"}, {}])
def test_different_version_is_refused(stores, theirs):
    """A rank with another version of horoplug ends the job with an error of one line."""
    one, other = stores(2)
    other.register(1)
    record = {"size": 2, "host": "elsewhere", "unix": "nobody-listens-here"} | theirs
    other.set("0/rank/1", json.dumps(record).encode())
    (error,) = build_all([one], ranks=[0], size=2).values()
    which = theirs.get("version", "(an older one)")
    assert f"rank 1 has horoplug {which}, rank 0 {version()}; install the same one" in str(error)


def test_wrong_secret_is_refused(stores):
    """A rank whose secret has one wrong bit gets no connection, although it knows the addresses in the store."""
    before = descriptors()
    clients = stores(3)
    opened = descriptors()
    wrong = SECRET[:31] + bytes([SECRET[31] ^ 1])
    timeouts = {0: NEVER, 1: NEVER, 2: 1.0}
    outcome = build_all(clients, secret={2: wrong, 0: SECRET, 1: SECRET}, timeout=timeouts)
    assert isinstance(outcome[2], AuthenticationError)
    assert "ranks [0, 1] did not connect within 1 s" in str(outcome[2])
    assert "does not know this job's secret" in str(outcome[2])
    assert all(isinstance(outcome[rank], PeerLostError) for rank in (0, 1))
    assert "secret" in str(outcome[0])
    assert opened > before
    closes_down_to(opened)


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_rank_retries_when_an_unauthenticated_process_rejects_it(stores, tcp, monkeypatch, caplog):
    """Another process listens at a rank's address and rejects its peer. The peer connects when the rank listens."""
    original = connect_module.Connector._dial
    family, address = socket.AF_UNIX, "\0horoplug-test-" + secrets.token_hex(8)
    if tcp:
        family, address = socket.AF_INET, ("127.0.0.1", 0)
    with RefusingServer(family, address) as stranger:

        def dial(connector, key):
            right = connector._addresses
            if key == (0, 0) and not stranger.refused.is_set():
                wrong = stranger.address if tcp else stranger.address[1:].decode()
                connector._addresses = right | {0: wrong}
            original(connector, key)
            connector._addresses = right

        monkeypatch.setattr(connect_module.Connector, "_dial", dial)
        by_rank = build_all(stores(2), key={rank: f"h{rank if tcp else 0}" for rank in range(2)})
    check(dict(sorted(by_rank.items())))
    close_all(by_rank)
    assert "rank 1: a connection was rejected: rank 0 refused the connection" in caplog.text


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_unauthenticated_connections_are_dropped(stores, tcp, monkeypatch, caplog):
    """The ranks connect although other processes send garbage, nothing, half a frame, or unexpected descriptors."""
    attackers = []
    original = connect_module.Connector.connect_to

    def attack_first(connector, addresses, local, streams):
        for listener in connector._listeners:
            for i in range(12):
                sock = socket.socket(listener.family, socket.SOCK_STREAM)
                sock.settimeout(10)
                sock.connect(listener.getsockname())
                attackers.append(sock)
                if i % 4 == 0:
                    sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + secrets.token_bytes(100))
                elif i % 4 == 1:
                    sock.sendall(b"HPau\x02\x01")
                elif i % 4 == 2 and listener.family == socket.AF_UNIX:
                    socket.send_fds(sock, [b"HPau\x02\x01\0\0" + bytes(32)], [0, 1, 2])
        original(connector, addresses, local, streams)

    monkeypatch.setattr(connect_module.Connector, "connect_to", attack_first)
    monkeypatch.setattr(loop_module, "_INCOMING_SECONDS", NEVER)  # no time limit applies
    clients = stores(3)
    before = descriptors()
    by_rank = build_all(clients, key={rank: f"h{rank if tcp else 0}" for rank in range(3)})
    check(dict(sorted(by_rank.items())))
    close_all(by_rank)
    assert attackers
    for attacker in attackers:  # all were closed, at the latest with the listener
        with contextlib.suppress(ConnectionResetError):
            while attacker.recv(4096):
                pass
        attacker.close()
    closes_down_to(before)
    assert "does not speak horoplug's protocol" in caplog.text


@contextlib.contextmanager
def another_user(name, data=b""):
    """A process of another user that connects to an abstract socket and sends ``data``. Yields a pipe with its answer:
    "user" and the user's number, then what it got, in hex."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            os.setuid(65534)
            got = b""
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(name)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    sock.sendall(data)
                    got = sock.recv(100)
            os.write(write, f"user {os.getuid()} {got.hex()}".encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        yield read
    finally:
        os.close(read)
        os.waitpid(child, 0)


def test_processes_of_other_users_are_rejected(caplog):
    """A process that can see the name of a rank's socket gets not even the answer to a valid first message."""
    hello = Handshake(SECRET, Role.CLIENT, listener_context(0), "").start()
    name, listener = unix_listener(2)
    connector = connect_module.Connector(Identity(0, 2, 0, SECRET), time.monotonic() + NEVER)
    connector.listen(listener)
    with contextlib.closing(connector), another_user(f"\0{name}".encode(), hello) as answer:

        def answered():
            connector._acceptor.accept(listener)
            for connection in list(connector._pending):
                connector._advance(connection)
            return select.select([answer], [], [], 0)[0]

        until(answered)
        assert os.read(answer, 1000) == b"user 65534 "
        assert "a connection was rejected: a process of user 65534" in caplog.text


def test_process_of_another_user_is_not_taken_for_a_rank_of_this_host(caplog, monkeypatch):
    """It listens at the address that a rank has published; here it is the listening process that changes its user."""
    name, listener = unix_listener(2)
    connector = connect_module.Connector(Identity(1, 2, 0, SECRET), time.monotonic() + NEVER)
    with contextlib.closing(connector), listener:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        connector.connect_to({0: name}, {0})
        assert "in the place of rank 0, a process of user" in str(connector.rejections[0, 0])
        assert (connector._pending, list(connector._retries)) == ({}, [(0, 0)])


def test_host_token_is_not_sent_to_other_users():
    """With the token, a process of another user could claim to be on this host."""
    with HostToken(SECRET, "job", 20) as token, HostToken(SECRET, "job", 20) as second:
        assert token.value == second.value
        with another_user(token._listener.getsockname()) as answer:
            assert os.read(answer, 1000) == b"user 65534 "


def test_silent_host_displaces_only_its_own_connections(stores, monkeypatch):
    """A host is recognised by its address. Here the strangers have 127.0.0.2."""
    monkeypatch.setattr(connect_module, "SPARE_INCOMING", 2)
    monkeypatch.setattr(loop_module, "_INCOMING_SECONDS", NEVER)  # no time limit applies
    original = connect_module.Connector.connect_to
    waiting, closed = [], []

    def is_closed(sock):
        try:
            while sock.recv(4096):
                pass
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        return True

    def flood_first(connector, addresses, local, streams):
        for listener in connector._listeners if connector._me.rank == 0 else []:
            if listener.family != socket.AF_UNIX and not waiting:
                for source in ["127.0.0.1"] + ["127.0.0.2"] * 20:
                    sock = socket.create_connection(
                        listener.getsockname(), timeout=10, source_address=(source, 0)
                    )
                    connector._acceptor.accept(listener)
                    sock.setblocking(False)
                    waiting.append(sock)
                closed.extend(is_closed(sock) for sock in waiting)
        original(connector, addresses, local, streams)

    monkeypatch.setattr(connect_module.Connector, "connect_to", flood_first)
    by_rank = build_all(stores(2), key={0: "h0", 1: "h1"})
    check(dict(sorted(by_rank.items())))
    close_all(by_rank)
    for sock in waiting:
        sock.close()
    assert closed[:11] == [False] + [True] * 10


def test_silent_connection_is_dropped_while_ranks_connect(
    stores, monkeypatch, caplog, on_this_host
):
    monkeypatch.setattr(loop_module, "_INCOMING_SECONDS", 0.1)
    zero, one = stores(2)
    one.register(1)
    record = RECORD | {"size": 2, "host": on_this_host("h"), "unix": "x"}
    one.set("0/rank/1", json.dumps(record).encode())
    outcome = {}
    rank0 = threading.Thread(
        target=lambda: outcome.update(build_all([zero], [0], size=2, key="h")), daemon=True
    )
    rank0.start()
    record = json.loads(one.get(["0/rank/0"], 5)[0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as attacker:
        attacker.settimeout(20)
        attacker.connect("\0" + record["unix"])
        assert attacker.recv(1) == b""
    assert "did not authenticate within 0.1 s" in caplog.text
    assert not outcome  # rank 0 still waits for rank 1
    one._sock.close()
    rank0.join(scaled(20))
    assert isinstance(outcome[0], PeerLostError)
    assert outcome[0].rank == 1


@pytest.mark.parametrize("what", ["generation", "size", "rank", "lane", "duplicate"])
def test_authenticated_peer_with_wrong_identity_is_refused(stores, what, monkeypatch, caplog):
    original = connect_module.Connector.run_once
    errors = []

    def intrude(connector, store):
        if connector._listeners and connector._me.rank == 0 and not errors:
            if what == "duplicate" and (1, 0) not in connector._ready:
                return original(connector, store)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(connector._listeners[0].getsockname())
            sock.setblocking(False)
            me = Identity(
                9 if what == "rank" else 1,
                4 if what == "size" else 3,
                7 if what == "generation" else 0,
                SECRET,
            )
            with open("/dev/null") as null:
                me.fds = (null.fileno(), null.fileno())
                link = PeerConnection(
                    sock,
                    me,
                    target=0,
                    admit=lambda *_: None,
                    label="rank 0",
                    lane=int(what == "lane"),
                )
                link.connected()
                deadline = time.monotonic() + 5
                try:
                    while link.stage is not Stage.READY and time.monotonic() < deadline:
                        link.advance()
                        original(connector, store)
                except ProtocolError as error:
                    errors.append(error)
                finally:
                    link.close()
            return None
        return original(connector, store)

    monkeypatch.setattr(connect_module.Connector, "run_once", intrude)
    clients = stores(3)
    before = descriptors()
    outcome = {}
    builder = threading.Thread(
        target=lambda: outcome.update(build_all(clients[:2], [0, 1], size=3))
    )
    builder.start()
    outcome.update(build_all(clients[2:], [2], size=3))
    builder.join(scaled(30))
    if errors:  # a duplicate may connect after the connections are complete
        assert "rank 0 refused the connection" in str(errors[0])
        assert f"was refused: {what}" in caplog.text
    else:
        assert what == "duplicate"
    check(dict(sorted(outcome.items())))
    close_all(outcome)
    closes_down_to(before)
