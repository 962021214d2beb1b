"""send and recv on NumPy arrays."""

import json
import os
import random
import signal
import threading

import numpy as np
import pytest

import horoplug as hvd
from tests.harness.checks.errors import errors_of_survivors, internal, refused
from tests.harness.checks.rooted import check_pairs
from tests.harness.limits import scaled
from tests.harness.support import NO_LIMITS, ranks_fixture, seed, wait_until_stopped

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "ab", "aab", "abab")


def check_in_sets(key):
    check_pairs(key)
    if hvd.size() == 1:
        return
    members = sorted(random.Random(key).sample(range(hvd.size()), hvd.size() - 1))
    some = hvd.add_process_set(members)
    check_pairs(key + 1, some, members)
    check_pairs(key + 2)
    hvd.remove_process_set(some)


def test_many_sends_and_recvs_in_flight(ranks):
    ranks.run(check_in_sets, seed())


def check_blocking():
    """A token is passed around the ranks and grows with each hop."""
    size, rank = hvd.size(), hvd.rank()
    token = np.zeros((2, 3))
    for step in range(20):
        if rank == 0:
            handle = hvd.send_async(token + 1, 1 % size, step)
        assert hvd.recv(token, (rank - 1) % size, step) is token
        if rank == 0:
            hvd.synchronize(handle)
        else:
            assert hvd.send(token + 1, (rank + 1) % size, tag=step) is None
    assert (token == (20 * size if rank == 0 else 19 * size + rank)).all()


@pytest.mark.short("aa*")
def test_blocking_send_and_recv(ranks):
    ranks.run(check_blocking)


def check_large():
    """Exchange tensors larger than the slots of a rank with all ranks at once, beside an allreduce."""
    size, rank = hvd.size(), hvd.rank()
    count = 1_500_000
    handles, received = [], {}
    for peer in range(size):
        handles.append(hvd.send_async(np.full(count, 10 * rank + peer, np.float32), peer))
    total = hvd.allreduce_async(np.ones(100_000), op=hvd.Sum, name="among")
    for peer in reversed(range(size)):
        received[peer] = np.zeros(count, np.float32)
        handles.append(hvd.recv_async(received[peer], peer))
    for handle in reversed(handles):
        hvd.synchronize(handle)
    assert (hvd.synchronize(total) == size).all()
    for peer, data in received.items():
        assert (data == 10 * peer + rank).all()


def test_large_tensors_in_all_directions(ranks):
    ranks.run(check_large)


def check_beside_collectives(key):
    """Send between random pairs and wait in random order while allreduces run."""
    size, rank = hvd.size(), hvd.rank()
    common, own = random.Random(key), random.Random(f"{key} {rank}")
    for step in range(5):
        calls, checks, handles = [], [], []
        for tag in range(30):
            source, dest = common.randrange(size), common.randrange(size)
            count = common.choice([0, 1, 3000, 20_000, 300_000])
            if source == rank:
                calls.append((hvd.send_async, np.full(count, tag, np.float32), dest, tag))
            if dest == rank:
                data = np.full(count, -1, np.float32)
                calls.append((hvd.recv_async, data, source, tag))
                checks.append((data, tag))
        for n in range(4):
            data = np.full(10_000, n, np.float32)
            calls.append((hvd.allreduce_async_, data, None, f"beside.{n}", hvd.Sum))
            checks.append((data, n * size))
        own.shuffle(calls)
        handles = [call(*arguments) for call, *arguments in calls]
        own.shuffle(handles)
        for handle in handles:
            hvd.synchronize(handle)
        for data, value in checks:
            assert (data == value).all(), (step, value)


def test_random_traffic_beside_collectives(ranks):
    ranks.run(check_beside_collectives, seed())


def again(key):
    hvd.shutdown()
    hvd.init()
    check_beside_collectives(key)


def test_transfers_after_reinitialisation(ranks):
    for _ in range(3):
        ranks.run(again, seed())


@pytest.mark.parametrize("algorithm", ["direct", "stream", "inline"])
def test_send_and_recv_with_forced_algorithms(pool, algorithm):
    with pool.ranks(3, hosts="aab", env={"HOROPLUG_ALGORITHM": algorithm}) as job:
        job.run(check_beside_collectives, seed())
        job.run(check_large)


def check_refusals():
    data = np.ones(4)
    refused(ValueError, "rank 9 does not exist", lambda: hvd.send(data, 9))
    refused(ValueError, "tags are 0 or more", lambda: hvd.send_async(data, 0, -1))
    data.setflags(write=False)
    refused(ValueError, "", lambda: hvd.recv(data, 0))


def test_invalid_send_and_recv_calls_are_refused(ranks):
    ranks.run(check_refusals)


def mismatch():
    if hvd.rank() == 0:
        hvd.send(np.ones(3, np.float32), 1, 4)
    else:
        hvd.recv(np.ones(5), 0, 4)


def test_mismatched_send_and_recv_are_an_error_on_both_ranks(pool):
    with pool.ranks(2) as job:
        internal(
            job.outcomes(mismatch),
            "send from rank 0 to rank 1, tag 4",
            "float32 on rank 0 but float64 on rank 1",
            "[3] on rank 0 but [5] on rank 1",
        )
        job.run(check_blocking)


def wait_for_each_other():
    hvd.recv(np.ones(5), 1 - hvd.rank(), hvd.rank())


def test_deadlock_of_recvs_names_both_ranks(pool):
    env = {"HOROVOD_DEADLOCK_TIME_SECONDS": "1"}
    with pool.ranks(2, env=env) as job:
        internal(
            job.outcomes(wait_for_each_other),
            "deadlock",
            "from rank 1, tag 0",
            "from rank 0, tag 1",
        )
        job.run(check_blocking)


def go_round():
    """Pass large tensors around a ring until a call fails."""
    size, rank = hvd.size(), hvd.rank()
    data = np.ones(4_000_000, np.float32)
    while True:
        handle = hvd.send_async(data, (rank + 1) % size)
        hvd.recv(np.empty_like(data), (rank - 1) % size)
        hvd.synchronize(handle)


def die(victim, key):
    """Die at a random moment in a series of large transfers."""
    if hvd.rank() == victim:
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        threading.Timer(random.Random(key).uniform(0.0, 0.3), kill).start()
    go_round()


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab", "aaa"])
@pytest.mark.short("*aa*", failure=True)
def test_killed_rank_is_named_by_the_survivors(pool, hosts):
    key = seed()
    victim = random.Random(key).randrange(len(hosts))
    with pool.ranks(len(hosts), hosts=hosts, env=NO_LIMITS) as job:
        for outcome in errors_of_survivors(job.outcomes(die, victim, key), victim):
            assert "recv" in outcome.message or "send" in outcome.message


def stop_between_transfers(victim):
    """Send and receive several large tensors at once; after the first one, the victim stops amid others."""
    size, rank = hvd.size(), hvd.rank()
    data = np.zeros(4 << 20, np.float32)
    sends = [hvd.send_async(data, (rank + 1) % size, tag) for tag in range(12)]
    receives = [hvd.recv_async(np.empty_like(data), (rank - 1) % size, tag) for tag in range(12)]
    hvd.synchronize(receives[0])
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    for handle in [*sends, *receives[1:]]:
        hvd.synchronize(handle)
    hvd.barrier()  # A rank to which the victim had sent everything learns here that the job has failed.


@pytest.mark.parametrize("hosts", ["aa", "aaa"])
def test_rank_stopped_during_a_transfer_is_named(pool, hosts):
    victim = len(hosts) - 1
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": f"{scaled(2):.1f}"}
    with pool.ranks(len(hosts), hosts=hosts, env=env) as job:
        *others, stopped = job.workers
        job.start(stop_between_transfers, victim)
        wait_until_stopped(stopped.process.pid)
        try:
            outcomes = [worker.receive() for worker in others]
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        stopped.receive()
        internal(outcomes, f"rank {victim}")
        # Both transfers that have begun and those without a partner reach the limit.
        cause = f"waiting for rank {victim}, which does not answer"
        assert any(cause in outcome.message for outcome in outcomes)


def send_small_and_large():
    """Send one small and one large tensor from rank 0 to every rank."""
    size, rank = hvd.size(), hvd.rank()
    for n, count in enumerate([1, 200_000]):
        for peer in range(size):
            if rank == 0:
                handle = hvd.send_async(np.ones(count), peer, n)
            if rank == peer:
                hvd.recv(np.empty(count), 0, n)
            if rank == 0:
                hvd.synchronize(handle)


def test_timeline_names_the_paths(pool, tmp_path):
    path = tmp_path / "timeline.json"
    with pool.ranks(3, hosts="aab", env={"HOROVOD_TIMELINE": str(path)}) as job:
        job.run(send_small_and_large)
        job.run(hvd.shutdown)
    names = [event["name"] for event in json.loads(path.read_text())]
    media = [name for name in names if name.endswith("_SEND") and not name.startswith("NEGOTIATE")]
    # On the row of the tensor, and on the row of the batches.
    assert sorted(set(media)) == ["INLINE_SEND", "SELF_SEND", "SHM_SEND", "STREAM_SEND"]
