"""Messages after the handshake: somebody between the two ends can neither change nor repeat nor reorder them.

The relay of these tests passes the handshake through, on real sockets, and then attacks. Whatever it does, the receiver
raises TamperedMessageError and sees nothing of the message."""

import collections
import contextlib
import itertools
import logging
import os
import pickle
import random
import secrets
import select
import struct

import pytest

from horoplug.rendezvous.errors import (
    PeerLostError,
    ProtocolError,
    RendezvousError,
    TamperedMessageError,
)
from horoplug.rendezvous.network.auth import FRAME_BYTES, Handshake, Role
from horoplug.rendezvous.network.messages import OVERHEAD
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer
from horoplug.runner.functions import exchange
from tests.harness.pieces import send_in_pieces
from tests.harness.relay import Relay
from tests.harness.support import seed, until

SECRET = secrets.token_bytes(32)
HANDSHAKE = {"up": 3, "down": 2}  # frames in each direction


@pytest.fixture(autouse=True)
def _heard_by_caplog(monkeypatch):
    monkeypatch.setattr(logging.getLogger("horoplug"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("horoplug"), "level", logging.NOTSET)


# ---- the relay -------------------------------------------------------------------------------------------------------


def length_of(header):
    """Bytes of the message that begins with ``header``."""
    return OVERHEAD + struct.unpack_from("!I", header)[0]


def attacked(target, attacked_direction, attack):
    """A relay that passes on the handshake. ``attack(messages)``, an iterator over the messages of one direction ("up":
    from the client), yields what the relay sends instead."""

    def forward(direction, source, sink):
        for _ in range(HANDSHAKE[direction]):
            sink.sendall(_exactly(source, FRAME_BYTES))
        if direction == attacked_direction:
            for data in attack(_messages(source)):
                sink.sendall(data)
        while data := source.recv(1 << 16):
            sink.sendall(data)

    return Relay(target, forward)


def _messages(sock):
    with contextlib.suppress(ConnectionError):
        while True:
            start = _exactly(sock, 4)
            yield start + _exactly(sock, length_of(start) - 4)


def _exactly(sock, count):
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def changed_at(place):
    def attack(messages):
        message = bytearray(next(messages))
        message[place] ^= 1
        yield bytes(message)

    return attack


def repeated(messages):
    first = next(messages)
    yield first + first


def left_out(messages):
    next(messages)
    yield next(messages)


def swapped(messages):
    first = next(messages)
    yield next(messages) + first


def replaced(messages):
    """By one that another secret authenticates."""
    client, server = (Handshake(bytes(32), role, b"store", "x") for role in Role)
    frame = client.start()
    for end in itertools.cycle((server, client)):
        if not (frame := end.feed(frame)):
            break
    forger = client.channel()
    yield forger.seal(bytes(len(next(messages)) - OVERHEAD))


ATTACKS = {
    "length": changed_at(3),
    "tag of the length": changed_at(20),
    "payload": changed_at(40),
    "tag of the payload": changed_at(-1),
    "repeated": repeated,
    "left out": left_out,
    "swapped": swapped,
    "replaced": replaced,
}


# ---- the channel -----------------------------------------------------------------------------------------------------


def channels(context=b"x"):
    """The two ends of a connection, after the handshake."""
    client, server = (Handshake(SECRET, role, context, "the other end") for role in Role)
    server.feed(client.feed(server.feed(client.feed(server.feed(client.start())))))
    return client.channel(), server.channel()


def test_messages_arrive_in_pieces_of_any_size():
    rng = random.Random(seed())
    client, server = channels()
    payloads = [rng.randbytes(rng.choice((0, 1, 31, 4000))) for _ in range(200)]
    assert send_in_pieces(rng, client, server, payloads, 4000)[1] == payloads
    assert client.take(bytearray(server.seal(b"answer")), 10) == b"answer"


def test_any_changed_byte_is_noticed():
    for place in range(OVERHEAD + 5):
        client, server = channels()
        message = bytearray(client.seal(b"12345"))
        message[place] ^= 1 << random.randrange(8)
        with pytest.raises(TamperedMessageError, match="connection to the other end") as caught:
            server.take(message, 100)
        assert "\n" not in str(caught.value)


def test_messages_of_other_connections_and_directions_are_refused():
    client, server = channels()
    others = {"another connection": channels()[0], "another listener": channels(b"y")[0]}
    others["the receiver itself"] = server
    for other in others.values():
        with pytest.raises(TamperedMessageError):
            server.take(bytearray(other.seal(b"x")), 100)
    assert server.take(bytearray(client.seal(b"x")), 100) == b"x"


def test_random_bytes_only_ever_raise_the_error():
    rng = random.Random(seed())
    for _ in range(500):
        _, server = channels()
        with pytest.raises(TamperedMessageError):
            server.take(bytearray(rng.randbytes(rng.randint(36, 200))), 1 << 30)


def test_messages_beyond_the_length_limit_are_refused():
    client, server = channels()
    with pytest.raises(ProtocolError, match="11 bytes; the limit is 10"):
        server.take(bytearray(client.seal(bytes(11))[:36]), 10)


def answered(client, get):
    while client.poll_get(get) is None:
        select.select([client], [], [], 1.0)


# ---- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_store_server_discards_tampered_requests(attack, caplog):
    with (
        StoreServer(SECRET) as server,
        StoreClient.connect(*server.address, SECRET, 20.0) as witness,
        attacked(server.address, "up", attack) as relay,
    ):
        with StoreClient.connect(*relay.address, SECRET, 20.0) as victim:
            for key in ("one", "two"):
                with victim._lock:  # both are on their way before an answer is awaited
                    victim._send(b"\x02\0\0\0\0\0\0\x63\0\3" + key.encode() + b"\0\0\0\1x")
            with pytest.raises(RendezvousError, match="closed the connection"):
                victim.get(["never"], 20)
        if attack is repeated:  # the first of the two was authentic
            assert witness.get(["one"], 20) == [b"x"]
        else:
            assert server.value("one") is server.value("two") is None
        witness.set("still", b"works")
    assert "was changed, repeated, left out or reordered on its way" in caplog.text


def test_rank_whose_request_was_tampered_with_is_lost_for_that_reason():
    def change_second(messages):
        yield next(messages)
        yield from ATTACKS["payload"](messages)

    with (
        StoreServer(SECRET) as server,
        StoreClient.connect(*server.address, SECRET, 20.0) as other,
        attacked(server.address, "up", change_second) as relay,
        StoreClient.connect(*relay.address, SECRET, 20.0) as victim,
    ):
        victim.register(1)
        with pytest.raises(RendezvousError, match="closed the connection"):
            victim.set("k", b"v")
        with pytest.raises(PeerLostError, match="a message from it was changed on its way"):
            other.get(["from 1"], 20, [1])


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_store_client_discards_tampered_answers(attack):
    with (
        StoreServer(SECRET) as server,
        attacked(server.address, "down", attack) as relay,
        StoreClient.connect(*server.address, SECRET, 20.0) as witness,
        StoreClient.connect(*relay.address, SECRET, 20.0) as victim,
    ):
        witness.set("a", b"1")
        pending = [victim.begin_get(["a"], 20) for _ in range(2)]
        if attack is repeated:
            with contextlib.suppress(TamperedMessageError):
                assert victim.get(["a"], 20) == [b"1"]
            pending = []
        for get in pending:
            with pytest.raises(TamperedMessageError, match="rendezvous server at 127"):
                answered(victim, get)
        for _ in range(2):  # from now on every call raises it
            with pytest.raises(TamperedMessageError):
                victim.set("k", b"v")
        assert server.value("k") is None


# ---- functions and results -------------------------------------------------------------------------------------------


class Evil:
    """Unpickling it executes code."""

    def __reduce__(self):
        return os.putenv, ("HOROPLUG_TEST_EVIL", "1")


@pytest.fixture
def served(tmp_path):
    names = [tmp_path / name for name in ("function", "result")]
    names[0].write_bytes(pickle.dumps(collections.OrderedDict) * 100_000)
    with contextlib.ExitStack() as stack:
        function, result = (stack.enter_context(name.open("a+b")).fileno() for name in names)
        server = exchange.Exchange(SECRET, "127.0.0.1", function, [result])
        stack.callback(server.close)
        yield server, names[1]


def inject(messages):
    """Replace the payload of the second message by a pickle that executes code."""
    yield next(messages)
    message = next(messages)
    header, payload, tag = message[:36], message[36:-32], message[-32:]
    yield header + pickle.dumps(Evil()).ljust(len(payload), b".")[: len(payload)] + tag


def second(attack):
    def attack_second(messages):
        yield next(messages)
        yield from attack(messages)

    return attack_second


EXCHANGED = {name: second(attack) for name, attack in ATTACKS.items()} | {"pickle": inject}


@pytest.mark.parametrize("attack", EXCHANGED.values(), ids=EXCHANGED)
def test_rank_does_not_unpickle_a_tampered_function(served, attack):
    server, _ = served
    with attacked((server.address, server.port), "down", attack) as relay:
        client = exchange.Client(*relay.address, SECRET, 0)
        with pytest.raises(TamperedMessageError, match="launcher at 127"):
            client.function()
        client._sock.close()


@pytest.mark.parametrize("attack", EXCHANGED.values(), ids=EXCHANGED)
def test_tampered_result_is_not_stored(served, attack):
    server, result = served
    with attacked((server.address, server.port), "up", attack) as relay:
        client = exchange.Client(*relay.address, SECRET, 0)
        client.function()
        with contextlib.suppress(ConnectionError):
            client.write(b"r" * 3 * exchange.CHUNK_BYTES)
        with pytest.raises(ConnectionError):
            client.finish(exchange.RETURNED)
        client._sock.close()
    until(lambda: server.problems)
    assert "was changed, repeated, left out or reordered" in server.problems[0]
    assert not server.returned
    assert not result.read_bytes().strip(b"r")
