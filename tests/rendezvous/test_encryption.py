"""Encrypted connections of Python: the handshake, the messages, and the library that does the cryptography."""

import contextlib
import random
import secrets
import socket
import threading

import pytest

from horoplug.base.config import Config
from horoplug.rendezvous.errors import AuthenticationError, ProtocolError, TamperedMessageError
from horoplug.rendezvous.network.auth import Encryption, Handshake, Role
from horoplug.rendezvous.network.libcrypto import Cipher, PrivateKey, libcrypto
from horoplug.rendezvous.session import Rendezvous
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer
from horoplug.runner.functions import exchange
from tests.harness.pieces import send_in_pieces
from tests.harness.support import seed

SECRET = secrets.token_bytes(32)


def handshakes(client=Encryption.ON, server=Encryption.ON, context=b"x", secret=SECRET):
    """The two ends of a connection, after the handshake."""
    one = Handshake(secret, Role.CLIENT, context, "the server", client)
    other = Handshake(secret, Role.SERVER, context, "the client", server)
    other.feed(one.feed(other.feed(one.feed(other.feed(one.start())))))
    assert one.done
    assert other.done
    return one, other


# ---- the handshake ---------------------------------------------------------------------------------------------------


def test_both_ends_derive_the_same_keys_and_no_two_are_equal():
    seen = set()
    for server in (Encryption.ON, Encryption.AS_CLIENT):
        one, other = handshakes(server=server)
        keys = one.data_keys()
        assert other.data_keys() == keys[32:] + keys[:32]
        seen |= {keys[:32], keys[32:]}
    assert len(seen) == 4


def test_connection_without_encryption_has_no_data_keys():
    for server in (Encryption.OFF, Encryption.AS_CLIENT):
        one, other = handshakes(Encryption.OFF, server)
        assert one.data_keys() == other.data_keys() == b""


def test_keys_cannot_be_derived_from_the_secret_and_the_traffic():
    """Somebody who has recorded the handshake and learns the secret later still lacks what the private keys share."""
    one, _ = handshakes()
    recorded = Handshake(SECRET, Role.CLIENT, b"x", "the server", Encryption.ON)
    recorded._take_nonces(one._client_nonce, one._server_nonce)
    recorded.done = True
    assert recorded._mac(b"keys") == one._mac(b"keys")
    assert recorded.data_keys() != one.data_keys()


@pytest.mark.parametrize("end", ["client", "server"])
def test_ends_that_disagree_refuse_each_other(end):
    kinds = {"client": Encryption.ON, "server": Encryption.ON, end: Encryption.OFF}
    one = Handshake(SECRET, Role.CLIENT, b"x", "the server", kinds["client"])
    other = Handshake(SECRET, Role.SERVER, b"x", "the client", kinds["server"])
    with pytest.raises(AuthenticationError, match=r"set HOROPLUG_ENCRYPT alike") as caught:
        other.feed(one.start())
    assert "\n" not in str(caught.value)
    with pytest.raises(AuthenticationError):
        one.feed(other.farewell)


def test_server_cannot_change_the_clients_choice_of_encryption():
    for client in (Encryption.ON, Encryption.OFF):
        one = Handshake(SECRET, Role.CLIENT, b"x", "the server", client)
        plain = client is Encryption.ON
        other = Handshake(
            *(SECRET, Role.CLIENT, b"x", "x", Encryption.OFF if plain else Encryption.ON)
        )
        with pytest.raises(AuthenticationError, match="set HOROPLUG_ENCRYPT alike"):
            one.feed(other.start())


def test_downgrade_to_an_unencrypted_connection_is_detected():
    """A relay changes the kinds of both first frames, so that each side believes that the other does not encrypt."""
    one = Handshake(SECRET, Role.CLIENT, b"x", "the server", Encryption.ON)
    other = Handshake(SECRET, Role.SERVER, b"x", "the client", Encryption.AS_CLIENT)
    key, hello = bytes([5]), bytes([1])
    start = one.start()
    assert start[5:6] == key
    answer = other.feed(start[:5] + hello + start[6:])
    with pytest.raises(AuthenticationError, match="does not encrypt"):
        one.feed(answer)
    one = Handshake(SECRET, Role.CLIENT, b"x", "the server", Encryption.ON)
    other = Handshake(SECRET, Role.SERVER, b"x", "the client", Encryption.AS_CLIENT)
    start = one.start()
    answer = other.feed(start[:5] + hello + start[6:])
    proof = one.feed(answer[:5] + key + answer[6:])
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        other.feed(proof)


def test_replaced_public_keys_are_noticed():
    for place in (0, 1):
        one = Handshake(SECRET, Role.CLIENT, b"x", "the server", Encryption.ON)
        other = Handshake(SECRET, Role.SERVER, b"x", "the client", Encryption.ON)
        frames = [one.start()]
        frames.append(other.feed(frames[0]))
        mine = PrivateKey(libcrypto()).public
        frames[place] = frames[place][:8] + mine
        if place == 0:
            other = Handshake(SECRET, Role.SERVER, b"x", "the client", Encryption.ON)
            frames[1] = other.feed(frames[0])
        with pytest.raises(AuthenticationError, match="does not know this job's secret"):
            other.feed(one.feed(frames[1]))


def test_public_key_of_small_order_is_rejected():
    """A rank of the job that sends zeros; the library rejects the points of small order."""
    _, other = handshakes()
    other._client_nonce = bytes(32)
    with pytest.raises(AuthenticationError, match="the client sent no valid X25519 key"):
        other.data_keys()


# ---- messages --------------------------------------------------------------------------------------------------------


def test_encrypted_messages_arrive_in_pieces_of_any_size():
    rng = random.Random(seed())
    one, other = (end.channel() for end in handshakes())
    payloads = [b"plain text " * rng.choice((0, 1, 3, 400)) for _ in range(100)]
    stream, received = send_in_pieces(rng, one, other, payloads, 5000)
    assert received == payloads
    assert b"plain" not in stream
    assert one.take(bytearray(other.seal(b"answer")), 6) == b"answer"
    with pytest.raises(ProtocolError, match="the limit is"):
        one.take(bytearray(other.seal(b"answer")), 5)


def test_any_changed_byte_of_a_message_is_noticed():
    one, _ = handshakes()
    size = one.channel().overhead + 5
    for place in range(size):
        one, other = (end.channel() for end in handshakes())
        message = bytearray(one.seal(b"12345"))
        assert len(message) == size
        message[place] ^= 1 << random.randrange(8)
        with pytest.raises(TamperedMessageError):
            other.take(message, 100)


# ---- connections -----------------------------------------------------------------------------------------------------


class Recorder:
    """Passes on what two ends of a connection send, and records it. ``sent``: all bytes of both directions."""

    def __init__(self, target):
        self.sent = bytearray()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection(self._target)
                for source, sink in (ends, ends[::-1]):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.sent += data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.mark.parametrize("encrypt", [True, False])
def test_store_serves_clients_that_encrypt_and_others(encrypt):
    with (
        StoreServer(SECRET) as server,
        contextlib.closing(Recorder(server.address)) as recorder,
        StoreClient.connect(*recorder.address, SECRET, 20.0, encrypt=encrypt) as client,
        StoreClient.connect(*server.address, SECRET, 20.0, encrypt=not encrypt) as other,
    ):
        client.set("the key", b"the value")
        assert other.get(["the key"], 20.0) == [b"the value"]
        assert client.get(["the key"], 20.0) == [b"the value"]
        assert (b"the key" in recorder.sent) == (b"the value" in recorder.sent) == (not encrypt)


def test_function_and_result_of_run_are_encrypted_on_the_network(tmp_path):
    for encrypt in (True, False):
        with open(tmp_path / "function", "w+b") as function, open(tmp_path / "r", "w+b") as result:
            function.write(b"the function")
            function.flush()
            server = exchange.Exchange(SECRET, "127.0.0.1", function.fileno(), [result.fileno()])
            recorder = Recorder((server.address, server.port))
            try:
                client = exchange.Client(*recorder.address, SECRET, 0, encrypt)
                assert client.function() == b"the function"
                client.write(b"the result")
                client.finish(exchange.RETURNED)
            finally:
                server.close()
                recorder.close()
            assert server.returned == {0}
            for text in (b"the function", b"the result"):
                assert (text in recorder.sent) == (not encrypt)


# ---- the library -----------------------------------------------------------------------------------------------------


def test_aes_gcm_matches_a_published_test_vector():
    """Test case 14 of the specification of AES-GCM (McGrew, Viega)."""
    sealed = Cipher(libcrypto(), bytes(32)).seal(0, bytes(16))
    assert sealed.hex() == "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"


@pytest.mark.parametrize(
    ("file", "reason"),
    [("/nonexistent/libcrypto.so.3", "No such file"), ("libm.so.6", "it has no OpenSSL_version")],
)
def test_missing_libcrypto_is_an_error_of_one_line(monkeypatch, file, reason):
    monkeypatch.setenv("HOROPLUG_LIBCRYPTO", file)
    with pytest.raises(ValueError, match="HOROPLUG_ENCRYPT=1 needs OpenSSL's libcrypto") as caught:
        libcrypto()
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    config = Config(
        size=2, encrypt=True, secret_key=SECRET, rendezvous_addr="127.0.0.1", rendezvous_port=1
    )
    with pytest.raises(ValueError, match="cannot be used here"):
        Rendezvous(config)


def test_server_that_lacks_the_library_tells_the_client(monkeypatch):
    one = Handshake(SECRET, Role.CLIENT, b"x", "the server", Encryption.ON)
    other = Handshake(SECRET, Role.SERVER, b"x", "the client", Encryption.AS_CLIENT)
    monkeypatch.setenv("HOROPLUG_LIBCRYPTO", "/nonexistent")
    with pytest.raises(AuthenticationError, match="the client cannot be served: HOROPLUG_ENCRYPT"):
        other.feed(one.start())
    with pytest.raises(AuthenticationError, match="the server does not encrypt this connection"):
        one.feed(other.farewell)


def test_mpi_cannot_carry_data_that_has_to_be_encrypted():
    config = Config(
        size=2,
        encrypt=True,
        cpu_operations="mpi",
        secret_key=SECRET,
        rendezvous_addr="127.0.0.1",
        rendezvous_port=1,
    )
    with pytest.raises(ValueError, match="HOROVOD_CPU_OPERATIONS=mpi exclude each other"):
        Rendezvous(config)
