"""The key-value store: its guarantees for clients, and protection of each client from all others."""

import contextlib
import logging
import os
import pickle
import random
import secrets
import select
import socket
import sys
import threading

import pytest

from horoplug.rendezvous.errors import (
    AuthenticationError,
    MissingRanksError,
    PeerLostError,
    ProtocolError,
    RankTakenError,
    RendezvousError,
    StoreTimeoutError,
)
from horoplug.rendezvous.network.auth import FRAME_BYTES, Role, authenticate
from horoplug.rendezvous.store import protocol
from horoplug.rendezvous.store import server as server_module
from horoplug.rendezvous.store.client import AbandonedError, StoreClient
from horoplug.rendezvous.store.server import StoreServer
from horoplug.rendezvous.store.state import StoreState
from tests.harness.descriptors import descriptors
from tests.harness.limits import scaled
from tests.harness.strangers import RefusingServer
from tests.harness.support import seed, until

SECRET = secrets.token_bytes(32)
NEVER = 600.0  # seconds: longer than any test


@pytest.fixture(autouse=True)
def _heard_by_caplog(monkeypatch):
    """Make the logger propagate: an init() elsewhere in this process has stopped that."""
    monkeypatch.setattr(logging.getLogger("horoplug"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("horoplug"), "level", logging.NOTSET)


@pytest.fixture
def server():
    with StoreServer(SECRET) as running:
        yield running


@pytest.fixture
def connect(server):
    clients = []

    def make():
        clients.append(StoreClient.connect(*server.address, SECRET, 5.0))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


class Background:
    """Runs a function in a thread; ``result()`` waits for it and returns its value or raises its exception."""

    def __init__(self, function, *args, **kwargs):
        self._outcome = None
        self._thread = threading.Thread(
            target=self._run, args=(function, args, kwargs), daemon=True
        )
        self._thread.start()

    def _run(self, function, args, kwargs):
        try:
            self._outcome = True, function(*args, **kwargs)
        except BaseException as error:
            self._outcome = False, error

    def result(self, timeout=20):
        self._thread.join(scaled(timeout))
        assert self._outcome is not None, "still running"
        good, value = self._outcome
        if good:
            return value
        raise value


def raw(server):
    """An authenticated connection that can send invalid messages, and what makes them authentic."""
    sock = socket.create_connection(server.address, timeout=10)
    return sock, authenticate(sock, SECRET, Role.CLIENT, protocol.AUTH_CONTEXT, 5.0, "server")


def until_closed(sock):
    """Read until the server closes the connection; False if it does not."""
    try:
        while sock.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


# ---- requests --------------------------------------------------------------------------------------------------------


def test_set_get_claim_delete(connect):
    a, b = connect(), connect()
    a.set("k", b"1")
    assert b.get(["k"], 5) == [b"1"]
    a.set("k", b"")
    assert b.get(["k", "k"], 5) == [b"", b""]
    assert a.claim("c", b"a's")
    assert not b.claim("c", b"b's")
    assert a.get(["c"], 5) == [b"a's"]
    a.set("x/1", b"")
    a.delete("x/")
    with pytest.raises(StoreTimeoutError):
        a.get(["x/1"], 0)
    assert a.get([], 5) == []


def test_get_waits_for_all(connect):
    a, b = connect(), connect()
    waiting = Background(a.get, ["x", "y"], 10)
    b.set("y", b"2")
    b.set("x", b"1")
    assert waiting.result() == [b"1", b"2"]


def test_get_times_out_and_names_missing_keys(connect):
    a = connect()
    a.set("b", b"")
    with pytest.raises(StoreTimeoutError, match=r"0.05 s: a, c") as caught:
        a.get(["a", "b", "c"], 0.05)
    assert caught.value.missing == (0, 2)
    assert isinstance(caught.value, TimeoutError)


def test_requests_are_served_while_a_get_waits(connect):
    a, b = connect(), connect()
    pending = a.begin_get(["later"], 10)
    a.set("now", b"1")
    assert a.get(["now"], 5) == [b"1"]
    assert a.poll_get(pending) is None
    b.set("later", b"2")
    while (values := a.poll_get(pending)) is None:
        assert select.select([a], [], [], 5)[0], "no answer has arrived"
    assert values == [b"2"]
    a.abandon(pending)  # does nothing, because the get was answered
    other = a.begin_get(["never"], 10)
    a.abandon(other)
    b.set("never", b"")
    assert a.get(["never"], 5) == [b""]
    assert not a._abandoned
    assert not a._answers


def test_large_values_and_many_keys(connect):
    a = connect()
    big = secrets.token_bytes(protocol.MAX_VALUE)
    a.set("big", big)
    assert a.get(["big"] * 20, 10) == [big] * 20
    with pytest.raises(ValueError, match="limit"):
        a.set("big", big + b"x")
    with pytest.raises(ValueError, match="limit"):
        a.set("k" * (protocol.MAX_KEY + 1), b"")
    with pytest.raises(RendezvousError, match="limit"):
        a.get(["big"] * 65, 10)
    for i in range(1000):
        a.set(f"many/{i}", str(i).encode())
    assert a.get([f"many/{i}" for i in range(1000)], 5)[999] == b"999"


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_lost_rank_ends_a_waiting_get(connect):
    a, b, c = connect(), connect(), connect()
    b.register(1)
    waiting = Background(a.get, ["from 1"], NEVER, [1])
    patient = Background(c.get, ["from 2"], 30, [2])
    b._sock.close()  # as if the process was killed
    with pytest.raises(PeerLostError, match=rf"rank 1 \(pid {os.getpid()} .*\) ended") as caught:
        waiting.result()
    assert caught.value.rank == 1
    with pytest.raises(PeerLostError):  # later gets fail at once
        a.get(["from 1"], 30, [1])
    a.set("was set by 1", b"")
    assert a.get(["was set by 1"], 30, [1]) == [b""]
    with pytest.raises(PeerLostError):  # set, but the get also needs the key of the lost rank
        a.get(["was set by 1", "from 9"], 30, [1, 9])
    a.set("from 2", b"ok")
    assert patient.result() == [b"ok"]
    d = connect()
    d.register(1)  # a new process may take its place
    with pytest.raises(StoreTimeoutError):
        a.get(["from 1"], 0.01, [1])


def test_any_lost_rank_ends_a_get_that_needs_all(connect):
    a, b, c = connect(), connect(), connect()
    b.register(1)
    c.register(2)
    waiting = Background(a.get, ["table"], NEVER, [protocol.ANY_RANK])
    c.close()  # leaves
    b._sock.close()  # as if the process was killed
    with pytest.raises(PeerLostError) as caught:
        waiting.result()
    assert caught.value.rank == 1
    with pytest.raises(PeerLostError):
        a.get(["table"], 30, [protocol.ANY_RANK])
    a.set("table", b"")
    assert a.get(["table"], 30, [protocol.ANY_RANK]) == [b""]


def test_rank_that_leaves_is_not_lost(server, connect):
    a, b = connect(), connect()
    b.register(1)
    b.close()
    b.close()
    with pytest.raises(StoreTimeoutError):
        a.get(["from 1"], 0.05, [1])
    assert server.departures() == [1]


def test_rank_can_be_marked_lost(server, connect):
    a = connect()
    waiting = Background(a.get, ["k"], 30, [3])
    server.mark_lost(3, "rank 3 exited with code 7")
    with pytest.raises(PeerLostError, match="exited with code 7"):
        waiting.result()


def test_second_registration_of_a_rank_is_refused(connect):
    a, b = connect(), connect()
    a.register(0)
    a.register(0)
    with pytest.raises(RankTakenError, match=rf"rank 0 .* taken .*pid {os.getpid()}"):
        b.register(0)
    a.close()
    b.register(0)


def test_abort_ends_a_waiting_get(connect):
    a, b = connect(), connect()
    waiting = Background(a.get, ["7/x"], 30)
    other = Background(connect().get, ["8/x"], 30)
    b.abort("7/", 2, "rank 2 gave up: no luck")
    with pytest.raises(PeerLostError, match="no luck") as caught:
        waiting.result()
    assert caught.value.rank == 2
    with pytest.raises(PeerLostError):
        b.get(["7/y"], 30)
    b.set("8/x", b"")
    assert other.result() == [b""]
    b.delete("7/")
    with pytest.raises(StoreTimeoutError):
        b.get(["7/y"], 0)


def test_forked_child_does_not_delay_the_detection_of_a_dead_rank(connect, server):
    """A child forked by a rank (a data loader's worker) must not keep the rank's connection open."""
    a, b = connect(), connect()
    b.register(1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # stays alive until the test is over
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        b._sock.close()
        with pytest.raises(PeerLostError):
            a.get(["x"], 10, [1])
    finally:
        os.close(write)
        os.waitpid(child, 0)
    a.set("x", b"")  # the server still works
    assert a.get(["x"], 5) == [b""]


# ---- connecting ------------------------------------------------------------------------------------------------------


def test_wrong_secret_is_refused(server, connect, caplog):
    wrong = bytes([SECRET[0]]) + bytes([SECRET[1] ^ 128]) + SECRET[2:]
    with pytest.raises(AuthenticationError, match="does not know this job's secret") as caught:
        Background(StoreClient.connect, *server.address, wrong, 0.5).result()
    assert f"the rendezvous server at 127.0.0.1:{server.address[1]}" in str(caught.value)
    connect().set("still", b"works")


def test_client_retries_when_an_unauthenticated_server_rejects_it():
    """A process without the job's secret listens at the server's address and rejects the client. The server listens
    there when that process has ended."""
    with RefusingServer(socket.AF_INET, ("127.0.0.1", 0)) as stranger:
        client = Background(StoreClient.connect, *stranger.address, SECRET, NEVER)
        assert stranger.refused.wait(scaled(20))
        stranger.close()
        with StoreServer(SECRET, *stranger.address), client.result() as connected:
            connected.set("k", b"")


def test_connection_to_no_server_fails_in_time():
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        port = placeholder.getsockname()[1]
    with pytest.raises(RendezvousError, match=rf"127.0.0.1:{port} cannot be reached within 0.3 s"):
        StoreClient.connect("127.0.0.1", port, SECRET, 0.3)


def test_client_waits_for_the_server_to_start():
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        port = placeholder.getsockname()[1]
    client = Background(StoreClient.connect, "127.0.0.1", port, SECRET, 20.0)
    with StoreServer(SECRET, "127.0.0.1", port), client.result() as connected:
        connected.set("k", b"")


def test_lost_server_ends_a_waiting_get():
    server = StoreServer(SECRET)
    client = StoreClient.connect(*server.address, SECRET, 5.0)
    waiting = Background(client.get, ["k"], NEVER)
    until(lambda: server._state._waiting)
    server.close()
    server.close()
    with pytest.raises(RendezvousError, match=r"closed the connection.*did the job end"):
        waiting.result()
    with pytest.raises(RendezvousError):
        client.set("k", b"")
    client.close()


def test_lost_server_is_reported_alike_if_a_request_was_on_its_way():
    server = StoreServer(SECRET)
    client = StoreClient.connect(*server.address, SECRET, 5.0)
    server.close()
    with contextlib.suppress(OSError):
        client._sock.send(b"x")  # a closed socket answers with a reset
    poll = select.poll()
    poll.register(client._sock, 0)
    assert poll.poll(10_000)
    with pytest.raises(RendezvousError, match=r"has closed the connection; did the job end\?$"):
        client.set("k", b"")
    client.close()


def test_server_listens_on_one_interface_only(server):
    assert server.address[0] == "127.0.0.1"


# ---- misbehaving clients ---------------------------------------------------------------------------------------------

BAD_MESSAGES = {
    "unknown request": protocol.pack(99, 1),
    "reply as a request": protocol.pack(0, 1),
    "oversized": bytes(protocol.MAX_REQUEST + 1),
    "no header": b"\5\0\0",
    "padding": protocol.HEADER.pack(protocol.Op.LEAVE, 1, 0, 1),
    "trailing": protocol.pack(protocol.Op.LEAVE, 1, b"x"),
    "short": protocol.pack(protocol.Op.SET, 1, b"\0"),
    "key too long": protocol.pack(protocol.Op.DELETE, 1, b"\xff\xff" + b"k" * 65535),
    "value shorter than it says": protocol.pack(protocol.Op.SET, 1, b"\0\1k\0\0\0\5v"),
    "too many keys": protocol.pack(protocol.Op.GET, 1, bytes(4) + b"\xff\xff\xff\xff"),
    "negative rank": protocol.pack(
        protocol.Op.REGISTER, 1, protocol.pack_rank(-1) + protocol.pack_text("")
    ),
    "rank below -1": protocol.pack(protocol.Op.REGISTER, 1, b"\x80\0\0\0" + protocol.pack_text("")),
    "two ranks": [
        protocol.pack(protocol.Op.REGISTER, i, protocol.pack_rank(i) + protocol.pack_text(""))
        for i in (50, 51)
    ],
    "too many waits": [
        protocol.pack(protocol.Op.GET, i, protocol.pack_get(60, [b"no"], [-1])) for i in range(9)
    ],
}


@pytest.mark.parametrize("data", BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_malformed_message_ends_only_its_connection(server, connect, data):
    good = connect()
    waiting = Background(connect().get, ["k"], 30)
    bad, channel = raw(server)
    with bad:
        with contextlib.suppress(ConnectionError):  # closed before it was all sent
            for message in data if isinstance(data, list) else [data]:
                bad.sendall(channel.seal(message))
        assert until_closed(bad)
    good.set("k", b"fine")
    assert waiting.result() == [b"fine"]


def test_unauthenticated_connections_are_dropped(caplog):
    """Connections that send garbage, too much, slowly or nothing do not delay requests of authenticated clients."""
    with (
        StoreServer(SECRET, auth_seconds=NEVER) as server,
        StoreClient.connect(*server.address, SECRET, 5.0) as good,
    ):
        strangers = [socket.create_connection(server.address) for _ in range(50)]
        for i, stranger in enumerate(strangers):
            stranger.settimeout(10)
            if i % 3 == 0:
                stranger.sendall(b"\x16\x03\x01" + secrets.token_bytes(200))
            elif i % 3 == 1:
                stranger.sendall(b"HPau")  # an incomplete frame
        good.set("k", b"v")
        assert good.get(["k"], 5) == [b"v"]
        assert all(until_closed(s) for s in strangers[::3])
        for stranger in strangers:
            stranger.close()
    lines = [r.getMessage() for r in caplog.records]
    assert 0 < len(lines) <= server_module._LOGGED
    assert all("\n" not in line for line in lines)


def test_slow_unauthenticated_connections_are_dropped():
    with StoreServer(SECRET, auth_seconds=0.2) as server:
        silent, partial = (socket.create_connection(server.address, timeout=10) for _ in range(2))
        partial.sendall(bytes(FRAME_BYTES - 1))
        good = StoreClient.connect(*server.address, SECRET, 5.0)
        with silent, partial, good:
            assert until_closed(silent)
            assert until_closed(partial)
            good.set("k", b"")


def test_flood_of_connections_leaves_room_for_ranks(server, connect, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_UNAUTHENTICATED", 8)
    good = connect()
    strangers = [socket.create_connection(server.address, timeout=10) for _ in range(40)]
    assert all(until_closed(stranger) for stranger in strangers[:30])
    connect().set("k", b"")  # new clients can still connect
    assert good.get(["k"], 5) == [b""]
    for stranger in strangers:
        stranger.close()


def test_silent_host_displaces_only_its_own_connections(server, monkeypatch):
    """A host is recognised by its address. Here the strangers have 127.0.0.2."""
    monkeypatch.setattr(server_module, "MAX_UNAUTHENTICATED", 8)
    # Connections of ranks that are slow to authenticate.
    ranks = [socket.create_connection(server.address, timeout=10) for _ in range(3)]
    source = ("127.0.0.2", 0)
    strangers = [
        socket.create_connection(server.address, timeout=10, source_address=source)
        for _ in range(40)
    ]
    assert all(until_closed(stranger) for stranger in strangers[:30])
    for rank in ranks:
        authenticate(rank, SECRET, Role.CLIENT, protocol.AUTH_CONTEXT, 5.0, "server")
    for sock in ranks + strangers:
        sock.close()


def test_client_that_does_not_read_is_dropped(server, connect, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_OUTPUT", 4 << 20)
    good = connect()
    good.set("big", bytes(protocol.MAX_VALUE))
    bad, channel = raw(server)
    with bad:
        bad.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16
        )  # otherwise tens of MiB stay unread
        request = b"".join(
            channel.seal(protocol.pack(protocol.Op.GET, i, protocol.pack_get(5, [b"big"], [-1])))
            for i in range(40)
        )
        bad.sendall(request)
        good.set("after", b"")  # the server has read some of it and still works
        until(lambda: len(server._connections) == 1)  # the client still does not read
        assert until_closed(bad)
    assert good.get(["after"], 5) == [b""]


def test_server_and_clients_close_all_descriptors():
    before, threads = descriptors(), threading.active_count()
    for _ in range(20):
        with StoreServer(SECRET) as server:
            client = StoreClient.connect(*server.address, SECRET, 5.0)
            client.register(0)
            with pytest.raises(AuthenticationError):
                StoreClient.attempt(*server.address, bytes(32), 5.0)  # connect() would try again
            stranger = socket.create_connection(server.address)
            client.set("k", b"")
            client.close()
            stranger.close()
    assert descriptors() == before
    assert threading.active_count() == threads


def test_random_requests_only_ever_raise_protocol_errors():
    answers = []
    state = StoreState(lambda session, data: answers.append((session, data)))
    good = b"\0\1k\0\0\0\1v"
    for i in range(5000):
        junk = secrets.token_bytes(secrets.randbelow(40))
        payload = good[: secrets.randbelow(9)] + junk if i % 2 else junk
        session = i % 7
        try:
            state.request(session, secrets.randbelow(10), i, payload, now=float(i))
        except ProtocolError:
            state.closed(session)
        state.expire(float(i))
    for session in range(7):
        state.closed(session)
    assert not state._waiting
    assert not state._of_session


# ---- what it costs ---------------------------------------------------------------------------------------------------


def instructions(function, *arguments):
    """The number of Python bytecode instructions that a call executes, without those of comparisons in C."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return count


def state_with_gets(gets, keys):
    """A store in which this number of GETs wait for this number of keys each."""
    state = StoreState(lambda *_: None)
    names = [b"%d" % i for i in range(keys)]
    for i in range(gets):
        state.request(i, protocol.Op.GET, 1, protocol.pack_get(NEVER, names, [-1] * keys), 0.0)
    return state


def set_key(state, name=b"0"):
    payload = protocol.pack_key(name) + protocol.pack_value(b"v")
    state.request("setter", protocol.Op.SET, 1, payload, 0.0)


def test_cost_of_a_set_does_not_depend_on_the_keys_that_a_get_waits_for():
    few, many = (instructions(set_key, state_with_gets(4, keys)) for keys in (10, 2000))
    assert many == few


def test_repeated_keys_of_a_get_are_counted():
    answers = []
    state = StoreState(lambda _, message: answers.append(protocol.unpack(message)[0]))
    names = [b"a", b"b", b"a", b"b", b"a"]
    state.request(0, protocol.Op.GET, 1, protocol.pack_get(NEVER, names, [-1] * 5), 0.0)
    set_key(state, b"a")
    assert answers == [protocol.Reply.OK]
    set_key(state, b"b")
    assert answers == [protocol.Reply.OK, protocol.Reply.OK, protocol.Reply.VALUES]
    assert not state._waiting
    assert not state._of_session


def test_get_waits_again_for_a_key_that_was_deleted_meanwhile():
    answers = []
    state = StoreState(
        lambda session, message: answers.append((session, protocol.unpack(message)[0]))
    )
    state.request(0, protocol.Op.GET, 1, protocol.pack_get(NEVER, [b"a", b"b"], [-1, -1]), 0.0)
    set_key(state, b"a")
    state.request("d", protocol.Op.DELETE, 1, protocol.pack_key(b"a"), 0.0)
    set_key(state, b"b")
    assert all(session != 0 for session, _ in answers)
    set_key(state, b"a")
    assert answers[-1] == (0, protocol.Reply.VALUES)


def test_gets_of_several_threads_wait_at_the_same_time(connect):
    client, other = connect(), connect()
    draw = random.Random(seed())
    for turn in range(30):
        names = [f"key/{turn}/{i}" for i in range(8)]
        values = {}

        def get(name, values=values):
            (values[name],) = client.get([name], NEVER)

        threads = [threading.Thread(target=get, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        draw.shuffle(names)
        for name in names:
            other.set(name, name.encode())
            client.set("mine", b"")  # a call in the middle of the waits
        for thread in threads:
            thread.join(scaled(30))
            assert not thread.is_alive()
        assert values == {name: name.encode() for name in names}


@pytest.mark.parametrize("waiters", [1, 2])
def test_abandoned_get_ends_the_wait_of_another_thread_and_no_other_one(connect, waiters):
    client = connect()
    gets = [client.begin_get([f"key{i}"], NEVER) for i in range(waiters)]
    ends = {}

    def wait(i):
        try:
            ends[i] = client.wait_get(gets[i])
        except AbandonedError as error:
            ends[i] = error

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(waiters)]
    for thread in threads:
        thread.start()
    client.abandon(gets[0])
    threads[0].join(scaled(30))
    assert isinstance(ends.pop(0), AbandonedError)
    for i in range(1, waiters):
        client.set(f"key{i}", b"value")
        threads[i].join(scaled(30))
        assert ends == {i: [b"value"]}
    client.set("key0", b"late")
    assert client.get(["key0"], NEVER) == [b"late"]


def test_lost_server_ends_the_waits_of_all_threads():
    with StoreServer(SECRET) as server:
        client = StoreClient.connect(*server.address, SECRET, 5.0)
        ends = []

        def wait(i):
            try:
                client.get([f"key{i}"], NEVER)
            except RendezvousError as error:
                ends.append(str(error))

        threads = [threading.Thread(target=wait, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(scaled(30))
        assert not thread.is_alive()
    assert ends == ends[:1] * 4
    client.close()


@pytest.mark.parametrize(
    "error",
    [PeerLostError(1, "one"), MissingRanksError([1, 2], "two"), StoreTimeoutError([0], "three")],
)
def test_pickled_errors_keep_their_ranks(error):
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), str(received), vars(received)) == (type(error), str(error), vars(error))
