"""Which tensors of PyTorch go to the core at once, and that the results are those of the function in Python."""

import os
import random

import pytest
import torch

import horoplug.torch as hvd
from horoplug.common.ops import direct
from horoplug.common.opspec import BY_NAME
from horoplug.torch.adapter import ADAPTER
from tests.harness.support import ranks_fixture, seed

pytest_plugins = ["tests.harness.jobs"]
pytestmark = [
    pytest.mark.short,
    pytest.mark.skipif("HOROPLUG_DIRECT_CALLS" in os.environ, reason="they are switched off"),
    pytest.mark.skipif(ADAPTER.direct is None, reason="needs PyTorch 2.10"),
]

ranks = ranks_fixture("a", "aa")

NUMBERS = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


class Tensor(torch.Tensor):
    pass


def in_python(*_, **__):
    return "in Python"


IN_PLACE = direct(ADAPTER, BY_NAME["allreduce"], True, True, in_python)
INTO_NEW = direct(ADAPTER, BY_NAME["allreduce"], False, True, in_python)


def check_usual_calls():
    size = hvd.size()
    for dtype in NUMBERS:
        for shape in ((5,), (2, 1, 3), ()):
            x = torch.ones(shape).to(dtype)
            made = INTO_NEW(x, op=hvd.Sum, name="made")
            assert made.float().eq(size).all()
            assert (made.dtype, made.shape) == (x.dtype, x.shape)
            assert made is not x
            assert IN_PLACE(x, op=hvd.Sum) is x
            assert x.float().eq(size).all()
    rows = torch.arange(6.0).reshape(3, 2)
    assert (IN_PLACE(rows[1:], op=hvd.Sum) == torch.tensor([[2.0, 3.0], [4.0, 5.0]]) * size).all()
    leaf = torch.ones(3, requires_grad=True)
    assert IN_PLACE(leaf, op=hvd.Sum) is leaf
    with torch.inference_mode():
        assert INTO_NEW(torch.ones(3), op=hvd.Sum).tolist() == [size] * 3


OTHERS = {
    name: direct(ADAPTER, BY_NAME[name], False, True, in_python)
    for name in (
        *("allgather", "broadcast", "alltoall", "reducescatter", "reduce", "gather", "scatter"),
        *("send", "recv"),
    )
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def check_other_operations():
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.arange(6 * size).reshape(2 * size, 3).to(dtype) + rank
        every = torch.stack([x - rank + each for each in range(size)])
        part = slice(2 * rank, 2 * rank + 2)
        assert OTHERS["allgather"](x, name="x").equal(every.reshape(-1, 3))
        assert OTHERS["alltoall"](x, name="x").equal(every[:, part].reshape(-1, 3))
        assert OTHERS["reducescatter"](x, op=hvd.Sum).equal(every.sum(0).to(dtype)[part])
        assert OTHERS["broadcast"](x, size - 1).equal(every[size - 1])
        reduced = OTHERS["reduce"](x, root_rank=0, op=hvd.Min)
        assert reduced.equal(every[0] if rank == 0 else x)
        gathered = OTHERS["gather"](x, root_rank=0, name="x")
        assert gathered.equal(every.reshape(-1, 3) if rank == 0 else x[:0])
        assert OTHERS["scatter"](x, size - 1).equal(every[size - 1, part])
        handle = hvd.send_async(x, (rank + 1) % size, tag=2)
        y = torch.empty_like(x)
        assert OTHERS["recv"](y, (rank - 1) % size, 2) is y
        assert y.equal(every[(rank - 1) % size])
        hvd.synchronize(handle)
        rows = [torch.full((each + 1, 2), each).to(dtype) for each in range(size)]
        assert OTHERS["allgather"](rows[rank]).equal(torch.cat(rows))
    leaf = torch.ones(2 * size, requires_grad=True)
    for name, function in OTHERS.items():
        if name == "recv":
            continue
        roots = (0,) if name in (*ROOTED, "send") else ()
        assert function(leaf, *roots) == "in Python"
        if roots == ():
            assert function(torch.tensor(1.0)) == "in Python"


GROUP = direct(ADAPTER, BY_NAME["allreduce"], False, True, in_python, grouped=True)


def check_groups():
    given = [torch.full((i % 7 + 1, 2), float(i)) for i in range(200)]
    for _ in range(2):
        made = GROUP(given, op=hvd.Sum, name="group")
        assert all(x.equal(y * hvd.size()) for x, y in zip(made, given, strict=True))
    assert GROUP([given[0], given[1].clone().requires_grad_()]) == "in Python"
    assert GROUP([given[0], given[1].bfloat16()]) == "in Python"


def test_usual_calls_go_to_the_core(ranks):
    ranks.run(check_usual_calls)
    ranks.run(check_groups)
    ranks.run(check_other_operations)


def check_unusual_calls():
    x = torch.ones(2, 3)
    complex_numbers = torch.ones(3, dtype=torch.complex64)
    for tensor in (
        *(x > 0, x[:0], x.T, x[:, ::2], torch.ones(1).expand(3), x.as_subclass(Tensor)),
        *(complex_numbers, complex_numbers.conj(), complex_numbers.conj()[:1].imag),
        *(torch._neg_view(x), torch.nn.Parameter(x), x.to_sparse(), x.to("meta")),
        *(torch._efficientzerotensor((3,)), torch.nested.nested_tensor([x, x]), [1.0], None),
    ):
        for function in (IN_PLACE, INTO_NEW):
            assert function(tensor) == "in Python", tensor
    assert INTO_NEW(torch.ones(3, requires_grad=True)) == "in Python"
    assert INTO_NEW(x, compression=hvd.Compression.fp16) == "in Python"

    def mapped(each):
        assert IN_PLACE(each) == INTO_NEW(each) == "in Python"
        return each.sum()

    torch.func.vmap(mapped)(x)
    torch.func.grad(mapped)(x)
    torch.func.functionalize(mapped)(x)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert IN_PLACE(torch.ones(3)) == "in Python"


def test_all_other_calls_go_to_the_function_in_python(ranks):
    ranks.run(check_unusual_calls)


def check_random_calls(number):
    draw = random.Random(number)
    numbers = torch.Generator().manual_seed(number + hvd.rank())
    for index in range(100):
        shape = [draw.randint(0, 4) for _ in range(draw.randint(0, 3))]
        dtype = draw.choice([*NUMBERS, torch.bool, torch.complex64])
        x = torch.randint(0, 9, shape, generator=numbers).to(dtype)
        options = {"op": draw.choice([hvd.Sum, hvd.Min, hvd.Max, hvd.Average])}
        if draw.random() < 0.7:
            options["name"] = f"{index}"
        function = draw.choice(
            [
                *(hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.broadcast),
                *(hvd.broadcast_, hvd.reduce, hvd.reducescatter, hvd.gather, hvd.scatter),
            ]
        )
        if function.__name__.removesuffix("_") in ROOTED:
            options["root_rank"] = draw.randint(0, hvd.size())
        if "reduce" not in function.__name__:
            options.pop("op")
        results = [outcome(each, x.clone(), options) for each in (function, function.__wrapped__)]
        assert results[0] == results[1], (number, index, function, x, options)


def outcome(function, x, options):
    try:
        made = function(x, **options)
    except Exception as error:
        return type(error), str(error)
    return type(made), made.dtype, made.shape, made.reshape(-1).view(torch.uint8).tolist()


def test_both_ways_have_the_same_results(ranks):
    ranks.run(check_random_calls, seed())


def check_gradient():
    x = torch.ones(3, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum, name="with gradient").sum().backward()
    assert x.grad.tolist() == [hvd.size()] * 3


def test_operations_with_gradients_are_differentiated(ranks):
    ranks.run(check_gradient)
