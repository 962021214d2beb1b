"""Ranks that call different operations of ``torch.distributed``: the operations, and the ways in which the last rank
waits for one that the others do not call."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

LIMIT = 25.0  # seconds: ends hangs
Wait = Callable[[str], Any]  # takes the name of the operation of the other ranks


def last() -> int:
    return dist.get_world_size() - 1


def new_group(ranks: Sequence[int]) -> Any:
    return dist.new_group(ranks, timeout=timedelta(seconds=LIMIT))


# ---- the operations of the other ranks

OTHERS: dict[str, Callable[[], Any]] = {
    "barrier": lambda: dist.barrier(),
    "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
    "all_gather": lambda: dist.all_gather(
        [torch.empty(2) for _ in range(dist.get_world_size())], torch.ones(2)
    ),
    "broadcast": lambda: dist.broadcast(torch.ones(2), 0),
    "recv": lambda: dist.recv(torch.ones(2), last()),
}


# ---- how the last rank waits for an operation that the others do not call


def started(other: str) -> Any:
    """An asynchronous operation that is not the others'."""
    if other == "all_reduce":
        parts = [torch.ones(1) for _ in range(dist.get_world_size())]
        return dist.reduce_scatter(torch.empty(1), parts, async_op=True)
    return dist.all_reduce(torch.ones(3), async_op=True)


def blocking(other: str) -> Any:
    if other == "all_reduce":
        return dist.broadcast(torch.ones(3), last())
    return dist.all_reduce(torch.ones(3))


def polling(work: Any) -> None:
    while not work.is_completed():
        time.sleep(0.01)
    work.wait()


def in_functional_call(other: str) -> Any:
    if other == "all_reduce":
        return functional.wait_tensor(
            functional.all_gather_tensor(torch.ones(3), 0, dist.group.WORLD)
        )
    return functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD))


def joined(other: str) -> None:
    """The main thread waits for the end of a thread that waits for the end of another one."""
    errors: list[RuntimeError] = []

    def operation() -> None:
        try:
            blocking(other)
        except RuntimeError as error:
            errors.append(error)

    inner = threading.Thread(target=operation)

    def outer() -> None:
        inner.start()
        inner.join()

    thread = threading.Thread(target=outer)
    thread.start()
    thread.join()
    raise errors[0]


def ddp_step(hook: Any = None) -> Wait:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    if hook is not None:
        model.register_comm_hook(None, hook)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()

    for _ in range(3):  # buckets are made anew after the first step; the last one is a plan
        step()
    return lambda other: step()


def sharded_step() -> Wait:
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()

    step()
    return lambda other: step()


def is_always(function: Wait) -> Callable[[], Wait]:
    return lambda: function


WAYS: dict[str, Callable[[], Wait]] = {
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
# FSDP 2 exists from PyTorch 2.6 on.
_IS_OLD = torch.__version__ < "2.6"
PAIRS = [(way, other) for way in WAYS for other in OTHERS if not (way == "FSDP 2" and _IS_OLD)]


def mismatched(pairs: Sequence[tuple[str, str]]) -> list[str]:
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


def is_named(text: str, size: int) -> bool:
    """Whether an error names both sides: the last rank, and the others of a group of this size."""
    sides = [f"ank {size - 1}", "ank 0" if size == 2 else f"anks 0-{size - 2}"]
    named = "deadlock: " in text and all(side in text or "ank 0" in text for side in sides)
    return named or "ranks disagree" in text
