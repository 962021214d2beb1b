"""Failures of a group: every rank gets an error of one line in a bounded time, which names what is wrong."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from horoplug.rendezvous.connections.records import RankRecords
from horoplug.torch.c10d import ProcessGroup
from horoplug.torch.c10d.gloo import StandIn
from tests.harness.limits import scaled
from tests.harness.process_groups import SECONDS, begin, end, new_file
from tests.harness.support import environment, wait_until_stopped

pytest_plugins = ["tests.harness.jobs"]


def one_line(error):
    text = str(error)
    assert "\n" not in text
    return text


def different_calls():
    """For each pair of calls: the error of this rank, and the group goes on."""
    rank = dist.get_rank()
    texts = []
    pairs = [
        (lambda: dist.all_reduce(torch.ones(3)), lambda: dist.all_reduce(torch.ones(4))),
        (lambda: dist.all_reduce(torch.ones(3)), lambda: dist.all_reduce(torch.ones(3).int())),
        (lambda: dist.broadcast(torch.ones(3), 0), lambda: dist.broadcast(torch.ones(3), 1)),
        (
            lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX),
            lambda: dist.all_reduce(torch.ones(3)),
        ),
    ]
    for calls in pairs:
        with pytest.raises(dist.DistBackendError) as caught:
            calls[rank]()
        texts.append(one_line(caught.value))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
    return texts


def different_operations():
    calls = [lambda: dist.all_reduce(torch.ones(3)), lambda: dist.broadcast(torch.ones(3), 0)]
    with pytest.raises(dist.DistBackendError) as caught:
        calls[dist.get_rank()]()
    return one_line(caught.value)


def wrong_splits():
    """The outputs of rank 0 do not fit what the others send."""
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="rows to this rank") as caught:
            dist.all_to_all_single(torch.zeros(3), torch.ones(2), [2, 1], [1, 1])
        text = one_line(caught.value)
    else:
        dist.all_to_all_single(torch.zeros(2), torch.ones(2), [1, 1], [1, 1])
    dist.barrier()
    return text


@pytest.mark.short(failure=True)
def test_calls_that_differ_between_ranks(pool, tmp_path):
    # The default, 5 s, is long for a test.
    limit = {"HOROVOD_DEADLOCK_TIME_SECONDS": "1"}
    with pool.ranks(2, init=False, env=limit) as ranks:
        ranks.run(begin, new_file(tmp_path))
        for texts in zip(*ranks.run(different_calls), strict=True):
            for rank, text in enumerate(texts):
                assert text.startswith(f"rank {rank}: "), text
                assert "rank 0" in text
                assert "rank 1" in text
        assert ranks.run(wrong_splits)[0].startswith("rank 0: ")
        for text in ranks.run(different_operations):
            assert "allreduce" in text
            assert "broadcast" in text
        ranks.run(end)


def killed(victim):
    """A rank dies during training: the survivors' next operation fails and names it."""
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(10))
    took = time.monotonic() - began
    # What is called afterwards fails at once, and the group can be destroyed.
    with pytest.raises(dist.DistBackendError, match=f"rank {victim}"):
        dist.barrier()
    with pytest.raises(dist.DistBackendError, match=f"rank {victim}"):
        dist.recv(torch.zeros(1), victim)
    dist.destroy_process_group()
    return took, one_line(caught.value)


@pytest.mark.short(failure=True)
def test_killed_rank_is_named(pool, tmp_path):
    with pool.ranks(3, hosts="aab", init=False) as ranks:
        ranks.run(begin, new_file(tmp_path), "horoplug", 600.0)
        outcomes = ranks.outcomes(killed, 1)
        assert outcomes[1].died
        for rank in (0, 2):
            took, text = outcomes[rank].value
            assert text.startswith(f"rank {rank}: ")
            assert "rank 1" in text
            assert took < scaled(10)


def stop_after_another_has_left(file):
    begin(file)
    if dist.get_rank() == 2:
        return end()
    with pytest.raises(dist.DistBackendError, match="rank 2 has shut down") as caught:
        dist.barrier()
    assert one_line(caught.value).endswith("on every rank, create the process group again")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(dist.DistBackendError) as caught:
        dist.recv(torch.zeros(1), 1 - dist.get_rank())
    end()
    return str(caught.value)


def test_stopped_rank_is_named_after_another_has_left(pool, tmp_path):
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": f"{scaled(2):.1f}"}
    with pool.ranks(3, init=False, env=env) as ranks:
        first, stopped, leaver = ranks.workers
        ranks.start(stop_after_another_has_left, new_file(tmp_path))
        wait_until_stopped(stopped.process.pid)
        try:
            text = first.receive().value
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        stopped.receive()
        leaver.receive()
        assert "has been waiting for rank 1, which does not answer" in text


def killed_during_backward(as_views, sparse):
    """The errors that the survivor gets from DistributedDataParallel, and afterwards."""
    torch.manual_seed(1)
    first = torch.nn.Embedding(10, 20, sparse=True) if sparse else torch.nn.Linear(10, 20)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(first, torch.nn.Linear(20, 3)),
        gradient_as_bucket_view=as_views,
        bucket_cap_mb=1,
    )
    batch = torch.tensor([2, 5]) if sparse else torch.ones(4, 10)
    for _ in range(3):  # buckets are made anew after the first step
        model(batch).sum().backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    texts = []
    for call in (
        lambda: model(batch).sum().backward(),
        lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
        dist.barrier,
    ):
        with pytest.raises(RuntimeError, match="rank 1 has died") as caught:
            call()
        texts.append(one_line(caught.value))
    dist.destroy_process_group()
    return texts


@pytest.mark.parametrize(
    ("as_views", "sparse"),
    [(False, False), (True, False), (False, True)],
    ids=["copies", "views", "sparse"],
)
def test_error_of_a_bucket_names_its_parameters(pool, tmp_path, as_views, sparse):
    with pool.ranks(2, init=False) as ranks:
        ranks.run(begin, new_file(tmp_path), "horoplug", 600.0)
        text, *later = ranks.outcomes(killed_during_backward, as_views, sparse)[0].value
        names = ["module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias"]
        found = [name for name in names if name in text]
        # A sparse gradient is a bucket of its own.
        assert found == names if not sparse else found in (names[:1], names[2:]), text
        assert not any("module." in each for each in later), later


def lone(file, seconds):
    """The other rank does not come."""
    began = time.monotonic()
    with pytest.raises(Exception, match=r".") as caught:
        begin(file, "horoplug", seconds)
    assert not dist.is_initialized()
    return time.monotonic() - began, one_line(caught.value)


def ended_store(rank, port):
    """Rank 0 has the store and ends before the group exists; rank 1 gets one line."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", port, 2, True, timedelta(seconds=20))
        store.wait(["here"], timedelta(seconds=20))
        os._exit(0)
    store = dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=20))
    store.set("here", "1")
    began = time.monotonic()
    with pytest.raises(Exception, match=r".") as caught:
        dist.init_process_group(
            "horoplug", store=store, rank=1, world_size=2, timeout=timedelta(seconds=10)
        )
    return time.monotonic() - began, one_line(caught.value)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_rank_that_does_not_come(pool, tmp_path):
    with pool.ranks(2, init=False) as ranks:
        files = [new_file(tmp_path), new_file(tmp_path)]
        for took, text in ranks.run(lambda: lone(files[int(os.environ["HOROVOD_RANK"])], 1.0)):
            assert took < scaled(10)
            assert "HORO" not in text
        assert (
            "the argument timeout of init_process_group"
            in ranks.run(lambda: lone(files[int(os.environ["HOROVOD_RANK"])] + "-again", 1.0))[0][1]
        )


def test_store_that_ends_before_the_group_exists(pool):
    port = free_port()
    with pool.ranks(2, init=False) as ranks:
        outcomes = ranks.outcomes(
            lambda: ended_store(int(os.environ["HOROVOD_RANK"]), port), timeout=60
        )
        assert outcomes[0].died
        assert not outcomes[1].failed, outcomes[1]
        took, text = outcomes[1].value
        assert took < scaled(15)
        assert "store" in text


def begin_with(file, **variables):
    """On every rank: the error of a group whose rank 0 has these variables."""
    if os.environ["HOROVOD_RANK"] == "0":
        os.environ.update(variables)
    with pytest.raises(Exception, match=r".") as caught:
        begin(file, seconds=2.0)
    for name in variables:
        os.environ.pop(name, None)
    return type(caught.value), one_line(caught.value)


def test_ranks_with_different_settings(pool, tmp_path):
    """The text names the variable."""
    file = new_file(tmp_path)
    with pool.ranks(2, init=False) as ranks:
        (_, text), (_, other) = found = ranks.run(
            lambda: begin_with(file, HOROPLUG_PLAN_AFTER_STEPS="7")
        )
        assert [kind for kind, _ in found] == [ValueError, ValueError]
        setting = (
            "ranks are configured differently: steps before a plan (HOROPLUG_PLAN_AFTER_STEPS)"
        )
        assert text.startswith(f"{setting} is 7 on rank 0 but 3 on rank 1"), text
        assert other.startswith(f"{setting} is 3 on rank 1 but 7 on rank 0"), other


def test_rank_that_reads_the_store_late_gets_the_reason(pool, tmp_path):
    """Rank 0 gives up as soon as rank 1 has published its settings; rank 1 asks the store of rank 0 later."""
    file = new_file(tmp_path)

    def start():
        from horoplug.rendezvous.errors import PeerLostError  # the class of this process

        publish = RankRecords.publish

        def publish_and_wait(self, kind, record):
            publish(self, kind, record)
            if self.rank == 1:
                with pytest.raises(PeerLostError):  # rank 0 has told the store that it gives up
                    self.store.get([self.key("never", 0)], SECONDS, [0])
                select.select([self.store], [], [], 0.5)  # readable only if the store has ended

        RankRecords.publish = publish_and_wait
        try:
            return begin_with(file, HOROPLUG_ENCRYPT="1")
        finally:
            RankRecords.publish = publish

    with pool.ranks(2, init=False) as ranks:
        for _, text in ranks.run(start):
            assert text.startswith("rank 0 encrypts what goes to other hosts, rank 1 does not"), (
                text
            )


def test_rank_0_that_cannot_start_leaves_no_store(pool, tmp_path):
    file = new_file(tmp_path)

    def start():
        found = begin_with(file, HOROPLUG_ENCRYPT="1", HOROPLUG_LIBCRYPTO="/nonesuch")
        return *found, [thread.name for thread in threading.enumerate()]

    with pool.ranks(2, init=False) as ranks:
        (_, wrong, threads), _ = ranks.run(start)
        assert wrong.startswith("HOROPLUG_ENCRYPT=1 needs OpenSSL's libcrypto"), wrong
        assert "horoplug-store" not in threads


def test_rank_0_that_cannot_start(pool, tmp_path):
    """The others name it, and not PyTorch's store, which answers."""
    file = new_file(tmp_path)
    with pool.ranks(2, init=False) as ranks:
        (_, wrong), (kind, text) = ranks.run(lambda: begin_with(file, HOROPLUG_NUM_STREAMS="x"))
        assert wrong.startswith("HOROPLUG_NUM_STREAMS='x' is wrong")
        assert kind.__name__ == "MissingRanksError"
        assert text.startswith("rank 0 did not connect within 2 s"), text
        assert "argument timeout of init_process_group" in text


@pytest.mark.short(failure=True)
def test_misspelt_backend(pool, tmp_path):
    file = new_file(tmp_path)

    def check():
        with pytest.raises(Exception, match="horoplag") as caught:
            begin(file, "horoplag")
        return one_line(caught.value)

    with pool.ranks(1, init=False) as ranks:
        assert ranks.run(check)


def test_other_ranks_have_another_backend(pool, tmp_path):
    """Rank 0 uses Gloo: the others are told at once instead of waiting for its store."""
    file = new_file(tmp_path)

    def check():
        backend = ["gloo", "horoplug"][int(os.environ["HOROVOD_RANK"])]
        began = time.monotonic()
        with pytest.raises(Exception, match=r"."):
            begin(file, backend, 1.0)
        return time.monotonic() - began

    with pool.ranks(2, init=False) as ranks:
        assert max(ranks.run(check)) < 20


def test_interrupted_program_ends():
    """Ctrl-C ends a wait."""
    program = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("horoplug", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
work = dist.group.WORLD.recv_anysource([torch.zeros(1)], 5)
print("waiting", flush=True)
work.wait()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=scaled(20))
    finally:
        process.kill()
        process.wait(scaled(10))
    assert "KeyboardInterrupt" in errors


def test_group_that_this_rank_has_left():
    """The text speaks of groups, not of horoplug's own init()."""
    group = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20))
    group.shutdown()
    for call in (lambda: group.allreduce([torch.ones(1)]), group.barrier):
        with pytest.raises(dist.DistBackendError) as caught:
            call()
        assert "this rank has shut down; create the process group again" in one_line(caught.value)
        assert "init()" not in str(caught.value)


def test_missing_rank_in_place_of_gloo_has_also_the_text_of_gloo():
    with pytest.raises(RuntimeError, match=r"rank 1 did not connect .* \(Socket Timeout\)"):
        StandIn(dist.HashStore(), 0, 2, timedelta(seconds=0.01))


def late_transfer(file):
    """A recv that is not done in time ends the group, as with Gloo."""
    rank = int(os.environ["HOROVOD_RANK"])
    group = StandIn(dist.FileStore(file, 2), rank, 2, timedelta(seconds=30))
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="timed out"):
            group.recv([torch.zeros(1)], 1, 1).wait(timedelta(milliseconds=10))
        with pytest.raises(dist.DistBackendError, match="timed out"):
            group.send([torch.zeros(1)], 1, 2).wait(timedelta(seconds=30))
    else:
        with pytest.raises(
            dist.DistBackendError, match=r"rank 0 has aborted the job: .* timed out"
        ):
            group.recv([torch.zeros(1)], 0, 3).wait()
    group.shutdown()


def test_late_transfer_in_place_of_gloo_ends_the_group(pool, tmp_path):
    with pool.ranks(2, init=False) as ranks:
        ranks.run(late_transfer, new_file(tmp_path))
