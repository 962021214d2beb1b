"""Ranks that call different operations get an error that names both sides, however they wait, and the group goes on.

No error comes while a rank that holds a pending future can still continue."""

import queue
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tests.harness.process_groups import begin, end, new_file

pytest_plugins = ["tests.harness.jobs"]

DEADLOCK_TIME = 0.6  # seconds; the default, 5 s, is long for a test
QUICK = {"HOROVOD_DEADLOCK_TIME_SECONDS": str(DEADLOCK_TIME)}
LIMIT = 25.0  # seconds: ends hangs
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def last():
    return dist.get_world_size() - 1


def new_group(ranks):
    return dist.new_group(ranks, timeout=timedelta(seconds=LIMIT))


# ---- the operations of the other ranks

OTHERS = {
    "barrier": lambda: dist.barrier(),
    "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
    "all_gather": lambda: dist.all_gather(
        [torch.empty(2) for _ in range(dist.get_world_size())], torch.ones(2)
    ),
    "broadcast": lambda: dist.broadcast(torch.ones(2), 0),
    "recv": lambda: dist.recv(torch.ones(2), last()),
}


# ---- how the last rank waits for an operation that the others do not call


def started(other):
    """An asynchronous operation that is not the others'."""
    if other == "all_reduce":
        parts = [torch.ones(1) for _ in range(dist.get_world_size())]
        return dist.reduce_scatter(torch.empty(1), parts, async_op=True)
    return dist.all_reduce(torch.ones(3), async_op=True)


def blocking(other):
    if other == "all_reduce":
        return dist.broadcast(torch.ones(3), last())
    return dist.all_reduce(torch.ones(3))


def polling(work):
    while not work.is_completed():
        time.sleep(0.01)
    work.wait()


def in_functional_call(other):
    if other == "all_reduce":
        return functional.wait_tensor(
            functional.all_gather_tensor(torch.ones(3), 0, dist.group.WORLD)
        )
    return functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD))


def joined(other):
    """The main thread waits for the end of a thread that waits for the end of another one."""
    errors = []

    def operation():
        try:
            blocking(other)
        except RuntimeError as error:
            errors.append(error)

    inner = threading.Thread(target=operation)

    def outer():
        inner.start()
        inner.join()

    thread = threading.Thread(target=outer)
    thread.start()
    thread.join()
    raise errors[0]


def ddp_step(hook=None):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    if hook is not None:
        model.register_comm_hook(None, hook)

    def step():
        model(torch.ones(2, 4)).sum().backward()

    for _ in range(3):  # buckets are made anew after the first step; the last one is a plan
        step()
    return lambda other: step()


def sharded_step():
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))

    def step():
        model(torch.ones(2, 4)).sum().backward()

    step()
    return lambda other: step()


def is_always(function):
    return lambda: function


WAYS = {
    "blocking": is_always(blocking),
    "wait": is_always(lambda other: started(other).wait()),
    "wait with a limit": is_always(lambda other: started(other).wait(timedelta(seconds=LIMIT))),
    "future": is_always(lambda other: started(other).get_future().wait()),
    "callback of a future": is_always(
        lambda other: started(other).get_future().then(lambda future: future.value()).wait()
    ),
    "polling": is_always(lambda other: polling(started(other))),
    "wait_tensor": is_always(in_functional_call),
    "joined thread": is_always(joined),
    "DDP": ddp_step,
    "DDP with a hook": lambda: ddp_step(default_hooks.fp16_compress_hook),
    "FSDP 2": sharded_step,
}
PAIRS = [(way, other) for way in WAYS for other in OTHERS]


def mismatched(pairs):
    """For each pair: the error of this rank. The group goes on."""
    texts = []
    for way, other in pairs:
        wait = WAYS[way]()
        dist.barrier()
        try:
            wait(other) if dist.get_rank() == last() else OTHERS[other]()
            text = "no error"
        except RuntimeError as error:
            text = str(error)
        tensor = torch.ones(1)
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise AssertionError(f"{way} and {other}: {text}") from error
        assert tensor.item() == dist.get_world_size(), (way, other)
        texts.append(text)
    return texts


# Each pair costs its time, so half of them run on two ranks and half on three.
@pytest.mark.parametrize("size", [2, 3])
def test_different_operations(pool, tmp_path, size):
    pairs = [
        (way, other)
        for number, (way, other) in enumerate(PAIRS)
        if number % 2 == size % 2 and (way != "FSDP 2" or TORCH >= (2, 6))
    ]
    with pool.ranks(size, init=False, env=QUICK) as ranks:
        ranks.run(begin, new_file(tmp_path), "horoplug", LIMIT)
        results = ranks.run(mismatched, pairs, timeout=5 * LIMIT)
        ranks.run(end)
    wrong = []
    for pair, texts in zip(pairs, zip(*results, strict=True), strict=True):
        for text in texts:
            sides = [f"ank {size - 1}", "ank 0" if size == 2 else "anks 0-1"]
            named = "deadlock: " in text and all(side in text or "ank 0" in text for side in sides)
            if not (named or "ranks disagree" in text):
                wrong.append((pair, text))
    assert not wrong


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
