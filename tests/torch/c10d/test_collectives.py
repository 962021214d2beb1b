"""Every collective of ``torch.distributed``, compared with results that each rank computes from all ranks' inputs."""

import contextlib
import functools
import random
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.harness.process_groups import process_groups
from tests.harness.support import seed

pytest_plugins = ["tests.harness.jobs"]

groups = process_groups("aa", "aab")

ReduceOp = dist.ReduceOp
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [torch.bool, *FLOATS, *INTEGERS, *COMPLEX]
BITWISE = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
REDUCTIONS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    **BITWISE,
}


_wrong: list[str] = []


def reductions_of(dtype):
    if dtype == torch.bool:
        return [ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *BITWISE]
    if dtype in COMPLEX:
        return [ReduceOp.SUM, ReduceOp.AVG]  # PyTorch refuses the others
    common = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    return [*common, ReduceOp.AVG] if dtype in FLOATS else [*common, *BITWISE]


class Draw(random.Random):
    """Random shapes, dtypes and inputs, the same on all ranks."""

    def shape(self, rows=None):
        shape = [self.choice([0, 1, 2, 3, 7, 40]) for _ in range(self.randrange(4))]
        return shape if rows is None else [rows, *shape[:2]]

    def tensor(self, shape, dtype):
        """Small numbers, so that reductions of all dtypes are exact."""
        generator = torch.Generator().manual_seed(self.randrange(2**31))
        low = 0 if dtype in (torch.bool, torch.uint8) else -2
        numbers = torch.randint(low, 3, (2, *shape), generator=generator)
        if dtype in COMPLEX:
            return torch.complex(numbers[0].double(), numbers[1].double()).to(dtype)
        return (numbers[0] % 2 if dtype == torch.bool else numbers[0]).to(dtype)

    def inputs(self, shape, dtype):
        """The tensor of every rank."""
        return [self.tensor(shape, dtype) for _ in range(dist.get_world_size())]

    def laid_out(self, tensor):
        """A copy, often one whose memory is not contiguous."""
        kind = self.randrange(3)
        if kind == 1 and tensor.dim() > 1:
            return (
                tensor.transpose(0, -1)
                .clone(memory_format=torch.contiguous_format)
                .transpose(0, -1)
            )
        if kind == 2 and tensor.dim():
            return torch.stack([tensor, tensor], -1)[..., 1]
        return tensor.clone()

    def empty_like(self, tensor):
        return self.laid_out(torch.zeros_like(tensor))


def reduced(tensors, op):
    total = functools.reduce(REDUCTIONS[op], tensors)
    return total / len(tensors) if op == ReduceOp.AVG else total


def same(actual, expected):
    """Equal values, except where dividing by the number of ranks rounds in another way."""
    try:
        torch.testing.assert_close(actual, expected)
    except AssertionError as error:
        # The rank goes on: otherwise the others would wait for it, and hide what is wrong.
        _wrong.append(f"{traceback.extract_stack(limit=2)[0].line}: {actual.dtype}: {error}")


def nothing_is_wrong():
    wrong, _wrong[:] = list(_wrong), []
    assert not wrong, "\n".join(wrong[:3])


def finish(work, asynchronous):
    if asynchronous:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    else:
        assert work is None


def repeat(key, check, count=8):
    """Call ``check`` with random numbers, dtypes, and both kinds of calls."""
    draw = Draw(key)
    for _ in range(count):
        check(draw, draw.choice(DTYPES), draw.random() < 0.5)
    nothing_is_wrong()


def check_broadcast(draw, dtype, later):
    inputs = draw.inputs(draw.shape(), dtype)
    root = draw.randrange(len(inputs))
    tensor = draw.laid_out(inputs[dist.get_rank()])
    finish(dist.broadcast(tensor, root, async_op=later), later)
    same(tensor, inputs[root])


def check_all_reduce(draw, dtype, later):
    for op in reductions_of(dtype):
        inputs = draw.inputs(draw.shape(), dtype)
        tensor = draw.laid_out(inputs[dist.get_rank()])
        finish(dist.all_reduce(tensor, op, async_op=later), later)
        same(tensor, reduced(inputs, op))


def check_scaled_sum(draw, dtype, later):
    dtype = draw.choice([torch.float32, torch.float64])
    inputs = draw.inputs(draw.shape(), dtype)
    tensor = inputs[dist.get_rank()].clone()
    factor = torch.tensor([0.5], dtype=dtype) if later else 0.5
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
    same(tensor, reduced(inputs, ReduceOp.SUM) * 0.5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def nothing_coalesced():
    group = dist.group.WORLD
    group._start_coalescing()
    assert group._end_coalescing().wait()


def test_coalescing_of_nothing(groups):
    groups.run(nothing_coalesced)


def check_all_reduce_coalesced(draw, dtype, later):
    op = draw.choice(reductions_of(dtype))
    inputs = [draw.inputs(draw.shape(), dtype) for _ in range(3)]
    tensors = [draw.laid_out(each[dist.get_rank()]) for each in inputs]
    work = dist.all_reduce_coalesced(tensors, op, async_op=later)
    if later:
        work.wait()
    for tensor, each in zip(tensors, inputs, strict=True):
        same(tensor, reduced(each, op))


def check_coalescing_manager(draw, dtype, later):
    dtype = draw.choice(FLOATS)
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [draw.inputs([size, 5], dtype) for _ in range(2)]
    sums = [each[rank].clone() for each in inputs]
    with dist._coalescing_manager(async_ops=later) as manager:
        for tensor in sums:
            dist.all_reduce(tensor)
    if later:
        manager.wait()
    rows = [torch.zeros(5, dtype=dtype) for _ in inputs]
    with dist._coalescing_manager(async_ops=later) as manager:
        for output, each in zip(rows, inputs, strict=True):
            dist.reduce_scatter_tensor(output, each[rank])
    if later:
        manager.wait()
    gathered = [torch.zeros(size * size, 5, dtype=dtype) for _ in inputs]
    with dist._coalescing_manager(async_ops=later) as manager:
        for output, each in zip(gathered, inputs, strict=True):
            dist.all_gather_into_tensor(output, each[rank])
    if later:
        manager.wait()
    for each, total, row, whole in zip(inputs, sums, rows, gathered, strict=True):
        same(total, reduced(each, ReduceOp.SUM))
        same(row, reduced(each, ReduceOp.SUM)[rank])
        same(whole, torch.cat(each))


def check_sparse(draw, dtype, later):
    dtype = draw.choice([torch.float32, torch.int64])
    inputs = [each * (each > 0) for each in draw.inputs([6, 4], dtype)]
    hybrid = draw.randrange(1, 3)
    tensor = inputs[dist.get_rank()].to_sparse(hybrid)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finish(dist.all_reduce(tensor, async_op=later), later)
    assert tensor.is_sparse
    same(tensor.to_dense(), reduced(inputs, ReduceOp.SUM))


def check_reduce(draw, dtype, later):
    for op in reductions_of(dtype):
        inputs = draw.inputs(draw.shape(), dtype)
        root = draw.randrange(len(inputs))
        tensor = draw.laid_out(inputs[dist.get_rank()])
        finish(dist.reduce(tensor, root, op, async_op=later), later)
        if dist.get_rank() == root:
            same(tensor, reduced(inputs, op))


def check_all_gather(draw, dtype, later):
    inputs = draw.inputs(draw.shape(), dtype)
    outputs = [draw.empty_like(each) for each in inputs]
    finish(dist.all_gather(outputs, draw.laid_out(inputs[dist.get_rank()]), async_op=later), later)
    for output, expected in zip(outputs, inputs, strict=True):
        same(output, expected)


def check_all_gather_into_tensor(draw, dtype, later):
    inputs = draw.inputs(draw.shape(rows=draw.randrange(3)), dtype)
    for join in (torch.cat, torch.stack):
        expected = join(inputs)
        output = draw.empty_like(expected)
        tensor = draw.laid_out(inputs[dist.get_rank()])
        finish(dist.all_gather_into_tensor(output, tensor, async_op=later), later)
        same(output, expected)


def check_gather(draw, dtype, later):
    inputs = draw.inputs(draw.shape(), dtype)
    root = draw.randrange(len(inputs))
    here = dist.get_rank() == root
    outputs = [draw.empty_like(each) for each in inputs]
    tensor = draw.laid_out(inputs[dist.get_rank()])
    finish(dist.gather(tensor, outputs if here else None, root, async_op=later), later)
    for output, expected in zip(outputs, inputs, strict=True):
        same(output, expected if here else torch.zeros_like(expected))


def check_scatter(draw, dtype, later):
    inputs = draw.inputs(draw.shape(), dtype)
    root = draw.randrange(len(inputs))
    output = draw.empty_like(inputs[0])
    given = [draw.laid_out(each) for each in inputs]
    here = dist.get_rank() == root
    finish(dist.scatter(output, given if here else None, root, async_op=later), later)
    same(output, inputs[dist.get_rank()])


def check_reduce_scatter(draw, dtype, later):
    rank, size = dist.get_rank(), dist.get_world_size()
    for op in reductions_of(dtype):
        inputs = draw.inputs([size, *draw.shape(rows=2)], dtype)
        expected = reduced(inputs, op)[rank]
        output = draw.empty_like(expected)
        parts = [draw.laid_out(each) for each in inputs[rank].unbind()]
        finish(dist.reduce_scatter(output, parts, op, async_op=later), later)
        same(output, expected)
        output = draw.empty_like(expected)
        tensor = draw.laid_out(inputs[rank])
        finish(dist.reduce_scatter_tensor(output, tensor, op, async_op=later), later)
        same(output, expected)


def check_all_to_all(draw, dtype, later):
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [[draw.randrange(4) for _ in range(size)] for _ in range(size)]
    width = draw.randrange(1, 4)
    inputs = [[draw.tensor([count, width], dtype) for count in each] for each in rows]
    expected = [each[rank] for each in inputs]
    outputs = [draw.empty_like(each) for each in expected]
    given = [draw.laid_out(each) for each in inputs[rank]]
    finish(dist.all_to_all(outputs, given, async_op=later), later)
    for output, each in zip(outputs, expected, strict=True):
        same(output, each)

    joined = torch.cat(expected)
    output = draw.empty_like(joined)
    splits = [each[rank] for each in rows]
    tensor = draw.laid_out(torch.cat(inputs[rank]))
    work = dist.all_to_all_single(output, tensor, splits, rows[rank], async_op=later)
    finish(work, later)
    same(output, joined)


def check_even_all_to_all(draw, dtype, later):
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = draw.inputs([size, *draw.shape(rows=2)], dtype)
    output = draw.empty_like(inputs[0])
    finish(dist.all_to_all_single(output, draw.laid_out(inputs[rank]), async_op=later), later)
    same(output, torch.stack([each[rank] for each in inputs]))


def check_barrier(draw, dtype, later):
    finish(dist.barrier(async_op=later), later)


def check_objects(draw, dtype, later):
    rank, size = dist.get_rank(), dist.get_world_size()
    objects = [{"rank": r, "tensor": draw.tensor([3], dtype)} for r in range(size)]
    gathered = [None] * size
    dist.all_gather_object(gathered, objects[rank])
    assert [each["rank"] for each in gathered] == list(range(size))
    same(gathered[-1]["tensor"], objects[-1]["tensor"])
    root = draw.randrange(size)
    collected = [None] * size if rank == root else None
    dist.gather_object("x" * rank, collected, root)
    assert collected == (["x" * r for r in range(size)] if rank == root else None)
    shared = [str(rank), rank]
    dist.broadcast_object_list(shared, root)
    assert shared == [str(root), root]
    (received,) = output = [None]
    dist.scatter_object_list(
        output, [f"for {r}" for r in range(size)] if rank == root else None, root
    )
    assert (received, output) == (None, [f"for {rank}"])


def check_functional(draw, dtype, later):
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    inputs = draw.inputs([2 * size, 3], dtype)
    tensor = inputs[rank]
    gathered = functional.all_gather_tensor(tensor, gather_dim=draw.randrange(2), group=group)
    assert gathered.numel() == size * tensor.numel()
    same(gathered[: 2 * size, :3] if gathered.shape[1] > 3 else gathered[: 2 * size], inputs[0])
    if dtype in FLOATS:
        total = reduced(inputs, ReduceOp.SUM)
        same(functional.all_reduce(tensor, "sum", group).clone(), total)
        same(functional.all_reduce(tensor, "avg", group).clone(), total / size)
        parts = functional.reduce_scatter_tensor(tensor, "sum", 0, group)
        same(parts.clone(), total[2 * rank : 2 * rank + 2])
        sums = functional.all_reduce_coalesced([tensor, tensor + 1], "sum", group)
        same(sums[1].clone(), total + size)
    same(functional.broadcast(tensor, size - 1, group).clone(), inputs[-1])
    even = functional.all_to_all_single(tensor, None, None, group)
    same(even.clone(), torch.cat([each[2 * rank : 2 * rank + 2] for each in inputs]))
    splits = [2] * size
    same(functional.all_to_all_single(tensor, splits, splits, group).clone(), even.clone())


def check_point_to_point(draw, dtype, later):
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = draw.inputs(draw.shape(), dtype)
    before, after = (rank - 1) % size, (rank + 1) % size
    tag = draw.randrange(5)
    received = draw.empty_like(inputs[0])
    work = dist.isend(draw.laid_out(inputs[rank]), after, tag=tag)
    if later:
        dist.irecv(received, before, tag=tag).wait()
    else:
        assert dist.recv(received, before, tag=tag) == before
    work.wait()
    same(received, inputs[before])

    received = [draw.empty_like(each) for each in inputs]
    transfers = [
        each
        for peer in range(size)
        if peer != rank
        for each in (
            dist.P2POp(dist.isend, inputs[rank], peer),
            dist.P2POp(dist.irecv, received[peer], peer),
        )
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    for peer in range(size):
        same(received[peer], torch.zeros_like(inputs[0]) if peer == rank else inputs[peer])


def check_any_source(draw, dtype, later):
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = draw.inputs([4], dtype)
    if rank:
        dist.send(inputs[rank], 0, tag=7)
        objects = [rank, "object"]
        dist.send_object_list(objects, 0)
    else:
        senders = set()
        for _ in range(1, size):
            tensor = torch.zeros_like(inputs[0])
            senders.add(sender := dist.recv(tensor, tag=7))
            same(tensor, inputs[sender])
        assert senders == set(range(1, size))
        for sender in senders:
            objects = [None, None]
            assert dist.recv_object_list(objects, sender) == sender
            assert objects == [sender, "object"]
    dist.barrier()


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.short("aa-*")
def test_result_is_that_of_one_process(groups, check):
    groups.run(repeat, seed(), check)


def many_in_flight(key):
    """Collectives of all kinds, started before the first one is waited for, and completed in another order."""
    draw = Draw(key)
    rank, size = dist.get_rank(), dist.get_world_size()
    checks = []
    for _ in range(40):
        inputs = draw.inputs([size, draw.randrange(1, 2000)], torch.float32)
        tensor = inputs[rank].clone()
        kind = draw.randrange(4)
        if kind == 0:
            work = dist.all_reduce(tensor, async_op=True)
            expected = reduced(inputs, ReduceOp.SUM)
        elif kind == 1:
            work = dist.broadcast(tensor, 1, async_op=True)
            expected = inputs[1]
        elif kind == 2:
            given, tensor = tensor, torch.empty_like(tensor)
            work = dist.all_to_all_single(tensor, given, async_op=True)
            expected = torch.stack([each[rank] for each in inputs])
        else:
            given, tensor = tensor, torch.empty(inputs[0].shape[1])
            work = dist.reduce_scatter_tensor(tensor, given, async_op=True)
            expected = reduced(inputs, ReduceOp.SUM)[rank]
        checks.append((work, tensor, expected))
    random.Random(rank).shuffle(checks)
    for work, tensor, expected in checks:
        work.wait()
        same(tensor, expected)
    nothing_is_wrong()


def test_many_operations_in_flight(groups):
    groups.run(many_in_flight, seed())


def large_tensors():
    """Sizes beyond one message of a link, and tensors whose works the caller drops."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full([3_000_001], float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.unique().tolist() == [size * (size + 1) / 2]
    dropped = [torch.ones(100_000) for _ in range(20)]
    for each in dropped:
        dist.all_reduce(each, async_op=True)
    dist.barrier()
    last = torch.ones(1)
    dist.all_reduce(last)
    assert all(each.unique().tolist() == [size] for each in dropped)


def test_large_tensors_and_dropped_works(groups):
    groups.run(large_tensors)


def refused():
    rank, size = dist.get_rank(), dist.get_world_size()
    one, meta = torch.ones(4), torch.ones(4, device="meta")
    lists = [one] * size
    calls = {
        "takes a list of one tensor": lambda: dist.all_gather(lists[1:], one),
        "must have the same size": lambda: dist.all_gather([*lists[1:], torch.ones(5)], one),
        "the larger tensor must have": lambda: dist.all_gather_into_tensor(torch.ones(3), one),
        "different dtypes": lambda: dist.all_gather_into_tensor(torch.ones(4 * size).int(), one),
        "scatter takes a list": lambda: dist.scatter(one, [one] * (size + 1), rank),
        "scatter: tensor 0": lambda: dist.scatter(one, [torch.ones(2)] * size, rank),
        "reduce_scatter takes a list": lambda: dist.reduce_scatter(one, lists[1:]),
        "all_to_all takes one tensor": lambda: dist.all_to_all(lists[1:], lists),
        "input_split_sizes takes one number": lambda: dist.all_to_all_single(
            one, one, [4] + [0] * (size - 1), [5] + [0] * (size - 1)
        ),
        "are not divisible": lambda: dist.all_to_all_single(torch.ones(7), torch.ones(7)),
        "have no sum": lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool)),
        "bitwise reductions take": lambda: dist.all_reduce(one, ReduceOp.BAND),
        "sparse tensors can only": lambda: dist.all_reduce(one.to_sparse(), ReduceOp.MAX),
        "meta": lambda: dist.all_reduce(meta),
        r"after expand\(\).* pass a copy": lambda: dist.all_reduce(torch.ones(1).expand(3)),
        "use .to_dense": lambda: dist.broadcast(one.to_sparse(), 0),
    }
    for text, call in calls.items():
        with pytest.raises((ValueError, TypeError, RuntimeError), match=text) as caught:
            call()
        assert "\n" not in str(caught.value), caught.value
    # A call that is refused counts for nothing: the group still works.
    with contextlib.suppress(StopIteration):
        dist.all_reduce(one)
    assert one.tolist() == [size] * 4


def test_invalid_calls_are_refused_in_one_line(groups):
    groups.run(refused)


def check_tensors_of_dropped_works():
    """Rank 0 keeps neither works nor tensors of its sends, and uses memory of that size before rank 1 receives."""
    go, count = torch.zeros(1), 200_000
    if dist.get_rank() == 0:
        for number in range(10):
            dist.isend(torch.full([count], float(number)), 1, tag=number)
        others = [torch.full([count], -1.0) for _ in range(20)]
        dist.send(go, 1, tag=99)
        assert all(other[0] == -1 for other in others)
    elif dist.get_rank() == 1:
        dist.recv(go, 0, tag=99)
        for number in range(10):
            tensor = torch.zeros(count)
            dist.recv(tensor, 0, tag=number)
            assert tensor.unique().tolist() == [number]
    dist.barrier()


def test_tensors_of_dropped_works_stay_alive(groups):
    groups.run(check_tensors_of_dropped_works)


def check_overlapping_tensors():
    """The input of an all_gather may be this rank's part of the output. Of other operations, the results are right too
    if the output is a part of the input, which is then overwritten while it is read."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (3, 100_000):
        expected = torch.arange(size * count, dtype=torch.float32)
        whole = torch.full((size * count,), -1.0)
        own = whole[rank * count : (rank + 1) * count]
        own.copy_(expected[rank * count : (rank + 1) * count])
        dist.all_gather_into_tensor(whole, own)
        assert torch.equal(whole, expected)
        shifted = torch.cat([whole, whole.new_zeros(1)])
        dist.all_gather_into_tensor(shifted[1:], shifted[rank * count : (rank + 1) * count])
        assert torch.equal(shifted[1:], expected)
        for part in range(size):
            summed = expected.clone()
            output = summed[part * count : (part + 1) * count]
            dist.reduce_scatter_tensor(output, summed)
            assert torch.equal(output, size * expected[rank * count : (rank + 1) * count])
        exchanged = expected + rank
        dist.all_to_all_single(exchanged, exchanged)
        own = expected[rank * count : (rank + 1) * count]
        assert torch.equal(exchanged, torch.cat([own + other for other in range(size)]))


def test_outputs_may_overlap_with_inputs(groups):
    groups.run(check_overlapping_tensors)


def blocking_calls():
    """What the methods of the group return to torch.distributed, whose caller waits."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    options = dist.BroadcastOptions(), dist.ReduceScatterOptions(), dist.AllreduceOptions()
    for each in options:
        if hasattr(each, "asyncOp"):  # that of all_reduce is younger than PyTorch 2.4
            each.asyncOp = False
    sent, part, total = torch.full((3,), float(rank)), torch.zeros(2), torch.ones(2)
    works = [
        group.broadcast([sent], options[0]),
        group._reduce_scatter_base(part, torch.ones(2 * size), options[1]),
        group.allreduce([total], options[2]),
    ]
    for work in works:
        assert work is None or work.wait()
    assert (sent.sum(), part[0], total[0]) == (0, size, size)
    return [work is None for work in works]


def blocking_calls_of_older_versions():
    """Before PyTorch 2.8, torch.distributed calls wait() of what a blocking call returns."""
    from horoplug.torch.c10d import calls

    group = dist.distributed_c10d._get_default_group()
    newer, calls.TAKES_NONE = calls.TAKES_NONE, False
    group.has_direct_calls = False  # they are for newer versions
    group._allow_direct_calls()
    try:
        return blocking_calls()
    finally:
        calls.TAKES_NONE = newer
        del group.has_direct_calls
        group._allow_direct_calls()


def test_blocking_calls_return_works_to_older_versions(groups):
    assert groups.run(blocking_calls_of_older_versions)[0] == [False] * 3


@pytest.mark.skipif(torch.__version__ < "2.8", reason="see above")
def test_blocking_calls_return_nothing(groups):
    assert groups.run(blocking_calls)[0] == [True] * 3
