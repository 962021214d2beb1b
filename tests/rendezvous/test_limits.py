"""The limits that many ranks reach: connections that authenticate at once, and open files."""

import contextlib
import errno
import os
import resource
import secrets
import socket
import subprocess
import sys

import pytest

from horoplug.base import descriptors
from horoplug.rendezvous.network.auth import FRAME_BYTES, Handshake, Role
from horoplug.rendezvous.store import protocol
from horoplug.rendezvous.store.server import StoreServer
from tests.harness import ROOT
from tests.harness.limits import scaled
from tests.harness.support import environment

SECRET = secrets.token_bytes(32)


def test_connections_of_many_ranks_at_once_are_served():
    """All have begun to authenticate before the first one goes on."""
    if descriptors.raise_limit() < 4000:
        pytest.skip("this test needs 4000 descriptors")
    count = 600
    with StoreServer(SECRET) as server, contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(server.address, timeout=60))
            handshake = Handshake(SECRET, Role.CLIENT, protocol.AUTH_CONTEXT, "server")
            sock.sendall(handshake.start())
            clients.append((sock, handshake))
        for sock, handshake in clients:
            while not handshake.done:
                frame = sock.recv(FRAME_BYTES, socket.MSG_WAITALL)
                assert len(frame) == FRAME_BYTES, "the server has closed the connection"
                sock.sendall(handshake.feed(frame))


def in_process(code, soft, hard=None):
    """Run Python code in a process with these limits on open files; returns its output."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (soft, most if hard is None else hard)
        ),
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )


def test_soft_limit_is_raised_to_the_hard_limit():
    done = in_process(
        "import resource\n"
        "from horoplug.base import descriptors\n"
        "limit = descriptors.raise_limit()\n"
        "assert limit == descriptors.limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "print(limit)",
        soft=100,
        hard=200,
    )
    assert done.stdout == "200\n", done.stderr


@pytest.mark.parametrize("hard", [300, 200])
def test_error_of_too_many_open_files_says_how_to_raise_the_limit(hard):
    done = in_process(
        "import errno, os\n"
        "from horoplug.base import descriptors\n"
        "print(descriptors.reason(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))",
        soft=200,
        hard=hard,
    )
    assert "Too many open files: this process may open 200 files; raise it with" in done.stdout
    assert ("ulimit -n 300" in done.stdout) == (hard == 300)
    assert ("limits.conf" in done.stdout) == (hard == 200)
    assert "fs.file-max" in descriptors.reason(OSError(errno.ENFILE, "too many"))


SERVER = """
import logging, sys
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer
logging.basicConfig(format="%(message)s")
with StoreServer(bytes(32)) as server, StoreClient.connect(*server.address, bytes(32), 60) as first:
    print(server.address[1], flush=True)
    sys.stdin.read()
    first.set("k", b"")  # the server has seen the connections, too
"""


def test_server_without_free_descriptors_says_what_the_limit_is():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process, contextlib.ExitStack() as stack:
        try:
            address = "127.0.0.1", int(process.stdout.readline())
            for _ in range(100):
                stack.enter_context(socket.create_connection(address, timeout=60))
            _, err = process.communicate(timeout=scaled(60))
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert "cannot accept connections: Too many open files: this process may open 64 files" in err


def test_ranks_of_horovodrun_have_the_hard_limit():
    code = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = min(hard, 4096)
    done = subprocess.run(
        [sys.executable, "-m", "horoplug.runner", "-np", "2", sys.executable, "-c", code],
        env=environment(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    assert done.stdout.count(f"{hard} {hard}") == 2, done.stderr
