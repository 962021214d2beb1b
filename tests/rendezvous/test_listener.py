"""Every listener of the package stays open: to silent connections, and without free descriptors or threads."""

import contextlib
import os
import queue
import secrets
import socket
import subprocess
import sys
import time

import pytest

from horoplug.rendezvous.connections.peer_connection import listener_context
from horoplug.rendezvous.errors import AuthenticationError
from horoplug.rendezvous.network.acceptor import Acceptor
from horoplug.rendezvous.network.auth import Role, authenticate
from horoplug.rendezvous.network.listener import MOST_UNAUTHENTICATED
from horoplug.rendezvous.network.messages import MessageStream
from horoplug.rendezvous.store import protocol
from horoplug.runner.network.probe import PEER_CONTEXT, Probe
from tests.harness import ROOT, program_text
from tests.harness.limits import scaled

SECRET = bytes(range(32))
NEVER = 600.0
LIMIT = 60.0  # seconds; only ends hangs

CONTEXTS = {
    "listener": b"any",
    "probe": PEER_CONTEXT,
    "store": protocol.AUTH_CONTEXT,
    "rank": listener_context(0),
}

# Prints the port of a listener; arguments: its kind, the number of descriptors that are free, the number of threads of
# its user.
SERVER = program_text("tests/rendezvous/programs/listener_server.py")


@contextlib.contextmanager
def server(kind, files=0, threads=0):
    """A process that listens; yields it and the address."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, kind, str(files), str(threads)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, ("127.0.0.1", int(process.stdout.readline()))
        finally:
            process.kill()


def connect(address, context, seconds=LIMIT):
    sock = socket.create_connection(address, timeout=LIMIT)
    try:
        channel = authenticate(sock, SECRET, Role.CLIENT, context, seconds, "server")
    except BaseException:
        sock.close()
        raise
    return MessageStream(sock, channel)


def is_echoed(stream):
    """Whether a connection that has authenticated is served."""
    word = secrets.token_bytes(8)
    try:
        stream.send(word)
        return stream.receive(100) == word
    except OSError:
        return False


@pytest.mark.parametrize("kind", CONTEXTS)
def test_silent_connections_that_take_all_descriptors_give_way(kind):
    """They have no time limit here, and come back at once."""
    with contextlib.ExitStack() as stack:
        process, address = stack.enter_context(server(kind, files=6))
        strangers = [
            stack.enter_context(socket.create_connection(address, timeout=LIMIT)) for _ in range(20)
        ]
        stream = connect(address, CONTEXTS[kind])
        stack.enter_context(stream.sock)
        assert strangers[0].recv(1) == b""  # the oldest one was dropped
        if kind == "listener":
            assert is_echoed(stream)
        process.stdin.close()
        assert "Too many open files" in process.stderr.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="the limit counts all processes of a user")
def test_connection_for_which_no_thread_can_be_started_is_the_only_one_lost():
    with contextlib.ExitStack() as stack:
        process, address = stack.enter_context(server("listener", threads=3))
        served = connect(address, b"any")
        stack.enter_context(served.sock)
        assert is_echoed(served)
        for _ in range(3):
            with connect(address, b"any").sock as lost:
                assert lost.recv(1) == b""  # the handshake needs no thread
        assert is_echoed(served)
        served.sock.close()
        deadline = time.monotonic() + scaled(LIMIT)
        while time.monotonic() < deadline:
            stream = connect(address, b"any")
            stack.enter_context(stream.sock)
            if is_echoed(stream):
                break
        else:
            pytest.fail("no further connection was served")
        process.stdin.close()
        assert (
            "no further thread can be started: raise the limit of processes"
            in process.stderr.read()
        )


def test_probe_is_reached_while_silent_connections_fill_it():
    said = queue.SimpleQueue()
    probe = Probe(SECRET, LIMIT, said.put)
    probe.listen("127.0.0.1")
    address = "127.0.0.1", said.get(timeout=LIMIT)["listening"]
    with contextlib.ExitStack() as stack:
        # Connections that are slow to authenticate, of another host than those that are silent.
        slow = [
            stack.enter_context(socket.create_connection(address, timeout=LIMIT)) for _ in range(3)
        ]
        strangers = [
            stack.enter_context(
                socket.create_connection(address, timeout=LIMIT, source_address=("127.0.0.2", 0))
            )
            for _ in range(MOST_UNAUTHENTICATED + 20)
        ]
        assert all(stranger.recv(1) == b"" for stranger in strangers[:20])
        probe.reach("peer", PEER_CONTEXT, 7, *address)
        assert said.get(timeout=LIMIT) == {
            "peer": {"number": 7, "own": "127.0.0.1", "reason": None}
        }
        for sock in slow:
            authenticate(sock, SECRET, Role.CLIENT, PEER_CONTEXT, LIMIT, "probe")


def test_handshake_and_first_message_in_pieces_or_at_once():
    """The listener takes no byte of the message that follows the handshake."""
    with server("listener") as (_, address):
        stream = connect(address, b"any")
        with stream.sock:
            assert is_echoed(stream)
        with socket.create_connection(address, timeout=LIMIT) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
        with pytest.raises(AuthenticationError, match="does not know"):
            authenticate(
                socket.create_connection(address, timeout=LIMIT),
                *(bytes(32), Role.CLIENT, b"any", LIMIT, "server"),
            )


def test_oldest_connection_of_the_busiest_source_is_least_deserving():
    dropped = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    with listener, contextlib.ExitStack() as stack:
        most = 6
        acceptor = Acceptor(
            lambda sock, label, source: stack.enter_context(sock),
            lambda sock, reason: dropped.append(sock.getpeername()[0]),
            print,
            most=lambda: most,
            seconds=NEVER,
        )

        def arrive(sources):
            for source in sources:
                address = (f"127.0.0.{source}", 0)
                stack.enter_context(
                    socket.create_connection(listener.getsockname(), LIMIT, source_address=address)
                )
                deadline = time.monotonic() + scaled(LIMIT)
                before = len(acceptor) + len(dropped)
                while len(acceptor) + len(dropped) == before and time.monotonic() < deadline:
                    acceptor.accept(listener)

        arrive([1, 2, 3, 2, 3, 3])
        assert dropped == []
        arrive([4, 4, 4, 4])
        assert dropped == [f"127.0.0.{source}" for source in (3, 2, 4, 4)]
        assert len(acceptor) == most


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(12, "Cannot allocate memory"), KeyError("x")]
)
def test_connection_that_cannot_be_taken_is_the_only_one_lost(error):
    said, taken = [], []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    with listener, contextlib.ExitStack() as stack:

        def admit(sock, label, source):
            if not said:
                raise error
            taken.append(stack.enter_context(sock))
            return sock

        acceptor = Acceptor(admit, print, said.append, most=lambda: 8, seconds=NEVER)
        first, second = (
            stack.enter_context(socket.create_connection(listener.getsockname(), LIMIT))
            for _ in range(2)
        )
        deadline = time.monotonic() + scaled(LIMIT)
        while not taken and time.monotonic() < deadline:
            acceptor.accept(listener)
        assert [sock.getpeername() for sock in taken] == [second.getsockname()]
        assert first.recv(1) == b""
        (line,) = said
        assert line.startswith(f"127.0.0.1:{first.getsockname()[1]} could not be served: ")
