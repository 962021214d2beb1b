"""Ranks that call different operations get an error that names both sides, however they wait, and the group goes on.

No error comes while a rank that holds a pending future can still continue."""

import queue
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness.mismatched_calls import LIMIT, PAIRS, is_named, mismatched, new_group
from tests.harness.process_groups import begin, end, new_file

pytest_plugins = ["tests.harness.jobs"]

DEADLOCK_TIME = 0.6  # seconds; the default, 5 s, is long for a test
QUICK = {"HOROVOD_DEADLOCK_TIME_SECONDS": str(DEADLOCK_TIME)}


# Each pair costs its time, so half of them run on two ranks and half on three.
@pytest.mark.parametrize("size", [2, 3])
def test_different_operations(pool, tmp_path, size):
    pairs = PAIRS[size % 2 :: 2]
    with pool.ranks(size, init=False, env=QUICK) as ranks:
        ranks.run(begin, new_file(tmp_path), "horoplug", LIMIT)
        results = ranks.run(mismatched, pairs, timeout=5 * LIMIT)
        ranks.run(end)
    texts = zip(pairs, zip(*results, strict=True), strict=True)
    assert not [(pair, text) for pair, each in texts for text in each if not is_named(text, size)]


# ---- two groups


def in_several_groups(orders):
    """Rank r calls barriers on the groups ``orders[r]``, which are those of all ranks but one, and all of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [
        new_group([r for r in range(size) if r != without or size == 2]) for without in range(size)
    ]
    dist.barrier()
    try:
        for number in orders[rank]:
            dist.barrier(group=groups[number])
        text = "no error"
    except RuntimeError as error:
        text = str(error)
    dist.barrier()
    for group in groups:
        if dist.get_rank(group) >= 0:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == dist.get_world_size(group)
    return text


@pytest.mark.parametrize(
    ("orders", "names"),
    [
        ([[0, 1], [1, 0]], ["rank 0 waits", "rank 1 waits"]),  # another order
        ([[2], [0], [1]], ["rank 0 waits", "rank 1 waits", "rank 2 waits"]),  # a cycle
    ],
    ids=["two ranks", "three ranks"],
)
def test_different_groups(pool, tmp_path, orders, names):
    with pool.ranks(len(orders), init=False, env=QUICK) as ranks:
        ranks.run(begin, new_file(tmp_path), "horoplug", LIMIT)
        for text in ranks.run(in_several_groups, orders):
            assert "deadlock: " in text, text
            for name in names:
                assert name in text.replace("Rank", "rank"), text
            assert text.count(" in group ") >= len(orders), text
        ranks.run(end)


# ---- no deadlock


def reads_a_pipe(seconds):
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({seconds})"], check=True)


def computes(seconds):
    matrix = torch.rand(60, 60)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        matrix = matrix @ matrix.T / 60


def waits_for_a_daemon(seconds):
    items = queue.Queue()
    threading.Thread(target=lambda: (time.sleep(seconds), items.put(1)), daemon=True).start()
    items.get()


def polls_between_computations(seconds, work):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        computes(0.02)
        assert not work.is_completed()


BUSY = [time.sleep, reads_a_pipe, computes, waits_for_a_daemon]


def late(kinds):
    """Rank 0 asks for a future, is busy for longer than the deadlock time, and then does what the others wait for."""
    mine = new_group(list(range(dist.get_world_size())))
    for kind in kinds:
        tensor = torch.ones(1)
        if dist.get_rank() == 0:
            work = dist.all_reduce(tensor, async_op=True)
            future = work.get_future()
            busy = (
                BUSY[kind]
                if kind < len(BUSY)
                else lambda s, w=work: polls_between_computations(s, w)
            )
            busy(3 * DEADLOCK_TIME)
            dist.barrier()
            dist.barrier(group=mine)
            future.wait()
        else:
            dist.barrier()
            dist.barrier(group=mine)
            dist.all_reduce(tensor)
        assert tensor.item() == dist.get_world_size()
    return True


def test_late_rank_with_a_pending_future_is_no_deadlock(pool, tmp_path):
    with pool.ranks(3, init=False, env=QUICK) as ranks:
        ranks.run(begin, new_file(tmp_path), "horoplug", LIMIT)
        assert ranks.run(late, list(range(len(BUSY) + 1))) == [True] * 3
        ranks.run(end)


def late_in_another_group():
    """Ranks 0 and 1 wait in different groups for rank 2, or for each other, while rank 2 sleeps."""
    rank = dist.get_rank()
    groups = [new_group(members) for members in ([0, 1], [1, 2])]
    if rank == 2:
        time.sleep(3 * DEADLOCK_TIME)
    if rank >= 1:
        dist.barrier(group=groups[1])
    if rank <= 1:
        dist.barrier(group=groups[0])
    return True


def test_late_rank_of_another_group_is_no_deadlock(pool, tmp_path):
    with pool.ranks(3, init=False, env=QUICK) as ranks:
        ranks.run(begin, new_file(tmp_path), "horoplug", LIMIT)
        assert ranks.run(late_in_another_group) == [True] * 3
        ranks.run(end)
