"""Jobs whose traffic between hosts is encrypted. A relay between two ranks records everything that they send."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import horoplug.numpy as hvd
from horoplug._native import Engine, EngineConfig, Error, Status
from horoplug.common.context import context
from horoplug.rendezvous.network.libcrypto import libcrypto
from tests.harness.relay import init_behind_relay

pytest_plugins = ["tests.harness.jobs"]

ENCRYPT = {"HOROPLUG_ENCRYPT": "1"}
TEXT = "a text that can be read on the network"
PATTERN = np.frombuffer(b"numbers that can be read on the network.", np.float64)


class Recorder:
    """What a relay does: it records what two ranks send each other. ``flip``: this byte of what rank 0 sends, on any
    connection, is changed; None: nothing is."""

    def __init__(self, flip=None):
        self.sent = bytearray()
        self.flipped = threading.Event()
        self._flip = flip

    def __call__(self, direction, source, sink):
        count = 0
        while data := bytearray(source.recv(1 << 16)):
            if direction == "down" and self._flip in range(count, count + len(data)):
                data[self._flip - count] ^= 1
                self.flipped.set()
            count += len(data)
            self.sent += data
            sink.sendall(data)


def init_behind_recorder(flip=None):
    init_behind_relay(hvd.init, Recorder(flip))


def work():
    """Every kind of traffic between two ranks. Returns what can be read in it."""
    large = np.tile(PATTERN, 100_000)
    for _ in range(6):  # negotiated, then as a plan
        got = hvd.allreduce(large, op=hvd.Max, name="large")
        assert np.array_equal(got, large)
    assert np.array_equal(hvd.broadcast(PATTERN, 0), PATTERN)
    assert np.array_equal(hvd.allgather(PATTERN), np.tile(PATTERN, 2))
    assert hvd.allgather_object(TEXT) == [TEXT, TEXT]
    assert hvd.broadcast_object(TEXT, 0) == TEXT
    hvd.allreduce(PATTERN, name="a name that can be read")
    if hvd.rank() == 0:
        return None
    sent = bytes(sys.horoplug_relay.forward.sent)
    seen = {text for text in (PATTERN.tobytes(), TEXT.encode()) if text in sent}
    seen |= {b"name" for _ in range(b"a name that can be read" in sent)}
    return len(seen), len(sent) > 6 * large.nbytes


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("encrypt", [True, False])
@pytest.mark.short
def test_tensors_objects_and_names_are_encrypted_on_the_network(pool, encrypt, streams):
    env = {"HOROPLUG_NUM_STREAMS": str(streams)} | (ENCRYPT if encrypt else {})
    with pool.ranks(2, hosts="ab", init=False, env=env) as job:
        job.run(init_behind_recorder)
        assert job.run(work)[1] == (0 if encrypt else 3, True)


@pytest.mark.short(failure=True)
def test_changed_byte_ends_the_job_and_the_error_names_the_peer(pool):
    with pool.ranks(2, hosts="ab", init=False, env=ENCRYPT) as job:
        job.run(init_behind_recorder, 3_000_000)

        def reduce():
            for _ in range(100):
                hvd.allreduce(np.tile(PATTERN, 100_000), name="x")

        zero, one = job.outcomes(reduce)
        assert one.kind == zero.kind == "HorovodInternalError", (zero, one)
        assert "rank 0: its data does not authenticate" in one.message
        assert "\n" not in one.message
        assert (
            job.run(lambda: hvd.rank() == 0 or sys.horoplug_relay.forward.flipped.is_set())
            == [True] * 2
        )


def test_encrypted_job_with_several_ranks_per_host_initialises_repeatedly(pool):
    with pool.ranks(4, hosts="aabb", init=False, env=ENCRYPT) as job:

        def again():
            for _ in range(5):
                hvd.init()
                got = hvd.allreduce(np.full(50_000, hvd.rank()), op=hvd.Sum)
                assert (got == 6).all()
                hvd.shutdown()
            return len(os.listdir("/proc/self/fd"))

        assert job.run(again) == job.run(again)


@pytest.mark.parametrize("hosts", ["ab", "aa"])
def test_ranks_with_different_encryption_settings_get_one_error_line(pool, hosts):
    with pool.ranks(2, hosts=hosts, init=False) as job:

        def disagree():
            if os.environ["HOROVOD_RANK"] == "1":
                os.environ["HOROPLUG_ENCRYPT"] = "1"
            hvd.init()

        for outcome in job.outcomes(disagree):
            assert outcome.kind == "ProtocolError", outcome
            assert outcome.message == (
                "rank 1 encrypts what goes to other hosts, rank 0 does not; set HOROPLUG_ENCRYPT alike on every rank"
            )


def test_job_does_not_start_without_the_library(pool):
    env = ENCRYPT | {"HOROPLUG_LIBCRYPTO": "/nonexistent/libcrypto.so.3"}
    with pool.ranks(2, hosts="ab", init=False, env=env) as job:
        for outcome in job.outcomes(hvd.init):
            assert outcome.kind == "ValueError", outcome
            assert "HOROPLUG_ENCRYPT=1 needs OpenSSL's libcrypto" in outcome.message
            assert "/nonexistent/libcrypto.so.3" in outcome.message
            assert "\n" not in outcome.message


def test_core_refuses_an_encrypted_job_without_keys():
    ours, theirs = socket.socketpair()
    with theirs:
        peer = (1, 1, ours.detach(), -1, -1)
        addresses = libcrypto().addresses
        with pytest.raises(Error, match="no keys for rank 1") as caught:
            Engine(EngineConfig(size=2, peers=[peer], libcrypto=addresses))
        assert caught.value.args[0] == Status.INVALID_ARGUMENT
        assert theirs.recv(1) == b""  # the engine has closed its descriptor


def add_connection_without_keys():
    here, there = socket.socketpair()
    with there:
        with pytest.raises(Error) as caught:
            context.engine().add_connection(1 - hvd.rank(), [here.detach()], b"")
        assert caught.value.args == (Status.INVALID_ARGUMENT, f"no keys for rank {1 - hvd.rank()}")
        assert there.recv(1) == b""  # the core has closed its end


def test_core_refuses_a_later_connection_without_keys(pool):
    """A job that asks for encryption never falls back, whatever the program passes to the core while it runs."""
    with pool.ranks(2, hosts="ab", env=ENCRYPT | {"HOROPLUG_CONNECT_ALL": "0"}) as job:
        job.run(add_connection_without_keys)


def test_core_links_no_cryptography():
    core = Path(hvd.__file__).parent.parent / "libhoroplug.so"
    needed = subprocess.run(["readelf", "-d", core], capture_output=True, text=True, check=True)
    assert "libc.so" in needed.stdout
    assert "crypto" not in needed.stdout
