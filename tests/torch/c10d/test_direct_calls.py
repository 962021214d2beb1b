"""Which calls of all_reduce go to the core without Python, and that the outcome is that of the method in Python."""

import os
import random
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from horoplug.torch.adapter import ADAPTER
from horoplug.torch.c10d import ProcessGroup, process_group
from horoplug.torch.c10d.calls import TAKES_NONE
from tests.harness.process_groups import process_groups
from tests.harness.support import seed

pytest_plugins = ["tests.harness.jobs"]
pytestmark = [
    pytest.mark.short,
    pytest.mark.skipif("HOROPLUG_DIRECT_CALLS" in os.environ, reason="they are switched off"),
    pytest.mark.skipif(ADAPTER.direct is None or not TAKES_NONE, reason="needs PyTorch 2.10"),
]

groups = process_groups("a", "aa")


class Tensor(torch.Tensor):
    pass


def in_python(*_, **__):
    return "in Python"


ALLREDUCE = process_group._in_c(in_python) if ADAPTER.direct is not None else None
KINDS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
NUMBERS = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64),
]


def options(op=dist.ReduceOp.SUM, later=False, limit=None):
    made = dist.AllreduceOptions()
    made.reduceOp, made.asyncOp = op, later
    if limit is not None:
        made.timeout = limit
    return made


def call(tensor, opts=None, group=None):
    """What the method returns: None if the core has performed the operation at once."""
    return ALLREDUCE.__get__(group or dist.group.WORLD)([tensor], opts or options())


def check_usual_calls():
    size = dist.get_world_size()
    for dtype in NUMBERS:
        for shape in ((5,), (2, 1, 3), ()):
            x = torch.ones(shape).to(dtype)
            assert call(x) is None
            assert x.eq(size).all()
    for kind, right in zip(KINDS, (2 * size, 2, 2**size, 2, 2), strict=True):
        for op in (getattr(dist.ReduceOp, kind), dist.ReduceOp(getattr(dist.ReduceOp, kind))):
            x = torch.full((3,), 2.0)
            assert call(x, options(op)) is None
            assert x.eq(right).all(), kind
    x = torch.ones(3, requires_grad=True)
    assert call(x) is None
    assert x.eq(size).all()


def test_usual_calls_go_to_the_core(groups):
    groups.run(check_usual_calls)


def check_unusual_calls():
    x = torch.ones(2, 3)
    complex_numbers = torch.ones(3, dtype=torch.complex64)
    for tensor in (
        *(x > 0, x[:0], x.T, x[:, ::2], torch.ones(1).expand(3), x.as_subclass(Tensor)),
        *(complex_numbers, complex_numbers.conj(), complex_numbers.conj()[:1].imag),
        *(torch._neg_view(x), x.to_sparse(), x.to("meta"), torch.nn.Parameter(x), [1.0], None),
    ):
        assert call(tensor) == "in Python", tensor
    for kind in ("BAND", "BOR", "BXOR"):
        assert call(x.int(), options(getattr(dist.ReduceOp, kind))) == "in Python"
    for opts in (
        options(dist._make_nccl_premul_sum(2.0)),
        options(later=True),
        options(limit=timedelta(seconds=5)),
        dist.ReduceOp.SUM,
        dist.BroadcastOptions(),
    ):
        assert call(x, opts) == "in Python", opts
    group = dist.group.WORLD
    bound = ALLREDUCE.__get__(group)
    for arguments in (
        (),
        ([x],),
        ([x, x], options()),
        ((x,), options()),
        (x, options()),
        (x, 1, 2),
    ):
        assert bound(*arguments) == "in Python"
    assert bound([x], opts=options()) == "in Python"
    assert ALLREDUCE(object(), [x], options()) == "in Python"
    with torch.autograd.profiler.profile():
        assert call(x) == "in Python"
    group._start_coalescing()
    assert call(x) == "in Python"
    group._end_coalescing().wait()
    assert call(x) is None

    group.allreduce([torch.ones(1)], options(later=True)).get_future().wait()
    direct = group._operations.direct
    of_futures = direct.callback_thread
    assert of_futures in {t.ident for t in threading.enumerate() if t.name == "horoplug futures"}
    # As if this thread called the callbacks of futures, whose operations have names of their own.
    direct.callback_thread = threading.get_ident()
    assert call(x) == "in Python"
    direct.callback_thread = of_futures
    assert call(x) is None


def test_unusual_calls_go_through_python(groups):
    groups.run(check_unusual_calls)


def random_tensor(draw):
    shape = [draw.randrange(4) for _ in range(draw.randrange(4))]
    x = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(draw.randrange(1000)))
    x = x.to(draw.choice([*NUMBERS, torch.bool]))
    if draw.random() < 0.2:
        x = x.T if x.ndim == 2 else x[::2] if x.ndim else x
    return x


def check_same_outcome(number):
    """Of random calls: the tensor, or the text of the error."""
    draw = random.Random(number)
    group = dist.group.WORLD
    direct = group._direct
    for _ in range(200):
        x = random_tensor(draw)
        op = getattr(dist.ReduceOp, draw.choice(KINDS))
        outcomes = []
        for each in (direct, None):
            mine = x.clone()
            if mine.is_floating_point():
                mine += dist.get_rank()
            group._direct = each
            try:
                group.allreduce([mine], options(op))
                outcomes.append(mine.tolist())
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1], (x, op)
    group._direct = direct


def test_outcomes_are_those_of_python(groups):
    groups.run(check_same_outcome, seed())


def check_late():
    """Operations that last longer than a call stays in the core."""
    x = torch.ones(3)
    if dist.get_rank():
        time.sleep(0.4)
    assert dist.all_reduce(x) is None
    assert x.eq(dist.get_world_size()).all()
    assert not dist.group.WORLD._operations._in_flight


def test_late_operations(groups):
    groups.run(check_late)


def check_switched_off():
    os.environ["HOROPLUG_DIRECT_CALLS"] = "0"
    try:
        group = dist.new_group(backend="horoplug")
    finally:
        del os.environ["HOROPLUG_DIRECT_CALLS"]
    x = torch.ones(3)
    assert call(x, group=group) == "in Python"
    dist.all_reduce(x, group=group)
    assert x.eq(dist.get_world_size()).all()
    dist.destroy_process_group(group)


def test_direct_calls_can_be_switched_off(groups):
    groups.run(check_switched_off)


def check_after_the_end():
    group = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=30))
    assert call(torch.ones(1), group=group) is None
    group.shutdown()
    texts = []
    for direct in (group._direct, None):
        group._direct = direct
        with pytest.raises(dist.DistBackendError, match=r"^rank 0: ") as caught:
            group.allreduce([torch.ones(1)], options())
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_a_group_that_has_ended(groups):
    groups.run(check_after_the_end)


def test_it_looks_like_a_method():
    method = ProcessGroup.allreduce
    assert method.__name__ == "allreduce"
    assert method.__qualname__ == "ProcessGroup.allreduce"
    assert method.__wrapped__.__module__ == "horoplug.torch.c10d.process_group"
