"""The handshake: peers with the secret authenticate; otherwise both sides raise a one-line error."""

import contextlib
import secrets
import socket
import struct
import threading

import pytest

from horoplug.rendezvous.errors import AuthenticationError
from horoplug.rendezvous.network.auth import FRAME_BYTES, Handshake, Role, authenticate
from tests.harness.limits import scaled

SECRET = secrets.token_bytes(32)


def flipped(secret: bytes) -> bytes:
    return bytes([secret[0] ^ 1]) + secret[1:]


def both_sides(client_args, server_args):
    """Run both sides over a socket pair. Returns the exception of each, or None."""
    ends = socket.socketpair()
    raised = {}

    def side(name, sock, args):
        try:
            authenticate(sock, *args)
            raised[name] = None
        except AuthenticationError as error:
            raised[name] = error
        finally:
            sock.close()

    threads = [
        threading.Thread(target=side, args=("client", ends[0], client_args)),
        threading.Thread(target=side, args=("server", ends[1], server_args)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(20))
    return raised["client"], raised["server"]


def arguments(role, secret=SECRET, context=b"x", timeout=5.0):
    return secret, role, context, timeout, "the other side"


@pytest.mark.short
def test_same_secret_authenticates():
    assert both_sides(arguments(Role.CLIENT), arguments(Role.SERVER)) == (None, None)


@pytest.mark.parametrize(
    "wrong", [{"secret": flipped(SECRET)}, {"context": b"y"}], ids=["secret", "context"]
)
@pytest.mark.short
def test_secret_with_one_wrong_bit_fails_on_both_sides(wrong):
    for client, server in (({}, wrong), (wrong, {})):
        errors = both_sides(arguments(Role.CLIENT, **client), arguments(Role.SERVER, **server))
        assert all(isinstance(error, AuthenticationError) for error in errors)
        assert all("does not know this job's secret" in str(error) for error in errors)
        assert all("\n" not in str(error) for error in errors)


@pytest.mark.short
def test_secret_of_wrong_length_is_refused():
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        Handshake(SECRET[:31], Role.CLIENT, b"", "x")


@pytest.mark.parametrize("role", Role)
@pytest.mark.short
def test_reflected_handshake_fails(role):
    """An attacker who echoes every frame does not authenticate."""
    mine, attacker = socket.socketpair()

    def reflect():
        with contextlib.suppress(BrokenPipeError):
            while data := attacker.recv(FRAME_BYTES):
                attacker.sendall(data)

    if role is Role.SERVER:  # the server answers only after a client's frame
        attacker.sendall(Handshake(SECRET, Role.CLIENT, b"x", "x").start())
    thread = threading.Thread(target=reflect)
    thread.start()
    with mine:
        with pytest.raises(AuthenticationError):
            authenticate(mine, *arguments(role))
        mine.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    attacker.close()


@pytest.mark.short
def test_reflected_handshake_over_two_connections_fails():
    """An attacker cannot have the server answer its own challenge over a second connection."""
    victim, oracle = (Handshake(SECRET, Role.SERVER, b"x", "x") for _ in range(2))
    hello = Handshake(SECRET, Role.CLIENT, b"x", "x").start()
    challenge = victim.feed(hello)
    oracle_challenge = oracle.feed(challenge)  # the victim's nonce as the attacker's own
    with pytest.raises(AuthenticationError):
        # The server never sends a client's proof, so the attacker can only send the server's own frames.
        victim.feed(oracle_challenge)


@pytest.mark.short
def test_proof_is_not_accepted_as_its_own_answer():
    """A false server with its own nonce sends the client's proof back as the server's proof."""
    client = Handshake(SECRET, Role.CLIENT, b"x", "x")
    client.start()
    challenge = Handshake(flipped(SECRET), Role.SERVER, b"x", "x").feed(
        Handshake(SECRET, Role.CLIENT, b"x", "x").start()
    )
    proof = client.feed(challenge)
    with pytest.raises(AuthenticationError, match="does not know"):
        client.feed(proof)
    assert not client.done


@pytest.mark.short
def test_replayed_handshake_fails():
    """A recorded handshake of a client cannot be replayed, since the server's nonce is fresh."""
    client, server = (
        Handshake(SECRET, Role.CLIENT, b"x", "x"),
        Handshake(SECRET, Role.SERVER, b"x", "x"),
    )
    hello = client.start()
    proof = client.feed(server.feed(hello))
    server.feed(proof)
    again = Handshake(SECRET, Role.SERVER, b"x", "x")
    again.feed(hello)
    with pytest.raises(AuthenticationError, match="does not know"):
        again.feed(proof)


@pytest.mark.short
def test_server_sends_no_proof_to_an_unauthenticated_client():
    server = Handshake(SECRET, Role.SERVER, b"x", "x")
    stranger = Handshake(flipped(SECRET), Role.CLIENT, b"x", "x")
    proof = stranger.feed(server.feed(stranger.start()))
    with pytest.raises(AuthenticationError):
        server.feed(proof)
    assert server.farewell[4:8] == bytes([2, 4, 0, 0])  # a rejection ...
    assert server.farewell[8:] == bytes(32)  # ... without any information


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" * 3, "does not speak horoplug's protocol"),
        (bytes(FRAME_BYTES), "does not speak horoplug's protocol"),
        (b"HPau\x01\x01\0\0" + bytes(32), "version 1"),
        (b"HPau\x02\x02\0\0" + bytes(32), "out of order"),
        (b"HPau\x02\x63\0\0" + bytes(32), "out of order"),
        (b"HPau\x02\x01\0\1" + bytes(32), "does not speak"),
    ],
)
@pytest.mark.short
def test_garbage_fails_authentication(role, data, message):
    mine, stranger = socket.socketpair()
    with mine, stranger:
        stranger.sendall(data)
        with pytest.raises(AuthenticationError, match=message):
            authenticate(mine, *arguments(role))


@pytest.mark.parametrize("role", Role)
@pytest.mark.short
def test_silent_slow_and_closing_peers_fail_in_time(role):
    mine, stranger = socket.socketpair()
    with mine, stranger:
        with pytest.raises(AuthenticationError, match=r"within 0\.1 s"):
            authenticate(mine, *arguments(role, timeout=0.1))
        assert mine.gettimeout() is None  # unchanged
    mine, stranger = socket.socketpair()
    stop = threading.Event()

    def drip():  # each byte arrives in time, but the frame does not
        while not stop.wait(0.02):
            stranger.send(b"H")

    thread = threading.Thread(target=drip)
    thread.start()
    with mine, pytest.raises(AuthenticationError, match=r"within 0\.3 s"):
        authenticate(mine, *arguments(role, timeout=0.3))
    stop.set()
    thread.join(5)
    stranger.close()
    mine, stranger = socket.socketpair()
    stranger.close()
    with mine, pytest.raises(AuthenticationError, match=r"closed|broke"):
        authenticate(mine, *arguments(role))


@pytest.mark.short
def test_random_frames_only_raise_authentication_errors():
    for i in range(2000):
        shake = Handshake(SECRET, Role.SERVER if i % 2 else Role.CLIENT, b"x", "x")
        header = struct.pack("!4sBBH", b"HPau", 2, i % 6, 0) if i % 3 else secrets.token_bytes(8)
        try:
            for _ in range(4):
                shake.feed(header + secrets.token_bytes(32))
        except AuthenticationError:
            pass
        assert not shake.done
