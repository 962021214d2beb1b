"""Every operation on NumPy arrays, for all dtypes and numbers of ranks; layouts, objects and signatures."""

import importlib.util
import inspect
import math
import random

import numpy as np
import pytest

import horoplug as hvd
from tests.harness.cases import REDUCTIONS, allreduce_test
from tests.harness.checks.arrays import PLACES, arrays, reduced, same, shapes
from tests.harness.support import ranks_fixture, seed

pytest_plugins = ["tests.harness.jobs"]

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
]


ranks = ranks_fixture(*PLACES)


def check_allreduce(dtype, op, key):
    size, rank = hvd.size(), hvd.rank()
    bits = []
    for shape in shapes(key):
        inputs = arrays(dtype, shape, key, size)
        mine = inputs[rank].copy()
        expected = reduced(inputs, op, dtype)
        bits.append(same(hvd.allreduce(mine, op=op), expected, dtype))
        assert (mine == inputs[rank]).all(), "the input was changed"
        result = hvd.allreduce_(mine, op=op)
        assert result is mine
        bits.append(same(mine, expected, dtype))
    return bits


test_allreduce = pytest.mark.short("aa-*-float32", "aa-Sum-int64")(
    allreduce_test(check_allreduce, DTYPES)
)


def check_grouped_allreduce(dtype, key):
    size, rank = hvd.size(), hvd.rank()
    groups = [arrays(dtype, shape, key + n, size) for n, shape in enumerate(shapes(key))]
    expected = [reduced(inputs, hvd.Sum, dtype) for inputs in groups]
    mine = [inputs[rank].copy() for inputs in groups]
    for outputs in (
        hvd.grouped_allreduce(mine, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum, name="group")),
        hvd.grouped_allreduce_(mine, op=hvd.Sum),
    ):
        assert isinstance(outputs, list)
        for actual, right in zip(outputs, expected, strict=True):
            same(actual, right, dtype)
    assert all(a is b for a, b in zip(outputs, mine, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.short("aa-*float32*")
def test_grouped_allreduce(ranks, dtype):
    ranks.run(check_grouped_allreduce, dtype, seed())


def check_mixed_group():
    """One group with several dtypes."""
    rank, size = hvd.rank(), hvd.size()
    group = [np.full(n + 1, rank, dtype) for n, dtype in enumerate(["f4", "i8", "f4", "f8"])]
    total = size * (size - 1) / 2
    for outputs in (
        hvd.grouped_allreduce(group, op=hvd.Sum),
        hvd.grouped_allreduce(group, op=hvd.Sum, name="mixed"),
    ):
        for a, b in zip(outputs, group, strict=True):
            same(a, np.full(b.shape, total), b.dtype.name)
    gathered = hvd.grouped_allgather(group)
    assert [g.shape[0] for g in gathered] == [size * (n + 1) for n in range(4)]
    assert [g.dtype for g in gathered] == [b.dtype for b in group]


def test_grouped_allreduce_of_several_dtypes(ranks):
    ranks.run(check_mixed_group)


def check_allgather(dtype, key):
    size, rank = hvd.size(), hvd.rank()
    draw = random.Random(key)
    for tail in [(), (3,), (2, 5)]:
        counts = [draw.randrange(0, 6) for _ in range(size)]
        inputs = [arrays(dtype, (n, *tail), key, size)[r] for r, n in enumerate(counts)]
        same(hvd.allgather(inputs[rank]), np.concatenate(inputs), dtype)
        pair = hvd.grouped_allgather([inputs[rank], inputs[rank][:1]])
        same(pair[0], np.concatenate(inputs), dtype)
        same(pair[1], np.concatenate([a[:1] for a in inputs]), dtype)
    scalars = arrays(dtype, (), key, size)
    same(hvd.allgather(scalars[rank]), np.stack(scalars), dtype)
    same(hvd.allgather(np.zeros((0, 4), dtype)), np.zeros((0, 4)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.short("aa-float32")
def test_allgather(ranks, dtype):
    ranks.run(check_allgather, dtype, seed())


def check_broadcast(dtype, key):
    size, rank = hvd.size(), hvd.rank()
    for root in range(size):
        for shape in shapes(key):
            inputs = arrays(dtype, shape, key + root, size)
            mine = inputs[rank].copy()
            same(hvd.broadcast(mine, root), inputs[root], dtype)
            assert (mine == inputs[rank]).all(), "the input was changed"
            assert hvd.broadcast_(mine, root_rank=root, name=f"b{root}") is mine
            same(mine, inputs[root], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.short("aa-float32")
def test_broadcast(ranks, dtype):
    ranks.run(check_broadcast, dtype, seed())


def check_alltoall(dtype, key):
    size, rank = hvd.size(), hvd.rank()
    draw = random.Random(key)
    for tail in [(), (3,)]:
        table = [[draw.randrange(0, 4) for _ in range(size)] for _ in range(size)]
        inputs = [arrays(dtype, (sum(row), *tail), key, size)[r] for r, row in enumerate(table)]
        parts = [inputs[r][sum(table[r][:rank]) : sum(table[r][: rank + 1])] for r in range(size)]
        received = [table[r][rank] for r in range(size)]
        for splits in (table[rank], np.array(table[rank], np.int32)):
            output, counts = hvd.alltoall(inputs[rank], splits)
            same(output, np.concatenate(parts), dtype)
            assert counts.dtype == np.int32
            assert counts.tolist() == received
    even = arrays(dtype, (2 * size, 3), key, size)
    expected = np.concatenate([a[2 * rank : 2 * rank + 2] for a in even])
    same(hvd.alltoall(even[rank]), expected, dtype)
    output, counts = hvd.alltoall(even[rank], splits=[1] * size)  # further rows are not sent
    same(output, np.stack([a[rank] for a in even]), dtype)
    output, counts = hvd.synchronize(hvd.alltoall_async(even[rank], name="even"))
    same(output, expected, dtype)
    assert counts.tolist() == [2] * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.short("aa-float32")
def test_alltoall(ranks, dtype):
    ranks.run(check_alltoall, dtype, seed())


def check_reducescatter(dtype, op, key):
    size, rank = hvd.size(), hvd.rank()
    for shape in [(size,), (size * 3 + 1, 4), (size - 1, 5), (10007,), (0, 3)]:
        inputs = arrays(dtype, shape, key, size)
        sizes = [shape[0] // size + (r < shape[0] % size) for r in range(size)]
        start = sum(sizes[:rank])
        expected = reduced(inputs, op, dtype)[start : start + sizes[rank]]
        same(hvd.reducescatter(inputs[rank], op=op), expected, dtype)
        one, two = hvd.grouped_reducescatter([inputs[rank], inputs[rank]], op=op)
        same(one, expected, dtype)
        same(two, expected, dtype)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bool"])
@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.short("aa-*float32*")
def test_reducescatter(ranks, dtype, op):
    ranks.run(check_reducescatter, dtype, REDUCTIONS[op], seed())


def check_factors(dtype):
    size, rank = hvd.size(), hvd.rank()
    total = size * (size + 1) // 2
    x = np.full(5, rank + 1, dtype)
    exact = {"prescale_factor": 2.0, "postscale_factor": 3.0}
    same(hvd.allreduce(x, op=hvd.Sum, **exact), np.full(5, 6 * total), dtype)
    shares = hvd.reducescatter(np.full((size, 2), rank + 1, dtype), op=hvd.Sum, **exact)
    same(shares, np.full((1, 2), 6 * total), dtype)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float16", "float32", "float64"])
@pytest.mark.short("aa-*")
def test_prescale_and_postscale(ranks, dtype):
    ranks.run(check_factors, dtype)


def check_integer_wraps():
    size = hvd.size()
    largest = np.full(3, 255, np.uint8)
    assert (hvd.allreduce(largest, op=hvd.Sum) == 255 * size % 256).all()
    # Negative sums are truncated towards zero, not rounded down.
    x = np.full(3, -1 - (hvd.rank() == 0), np.int32)
    assert (hvd.allreduce(x) == math.trunc((-1 - size) / size)).all()


def test_integers_wrap_and_truncate(ranks):
    ranks.run(check_integer_wraps)


def check_nan():
    x = np.array([1.0, math.nan if hvd.rank() == 0 else 1.0, math.inf], np.float32)
    for op in REDUCTIONS.values():
        y = hvd.allreduce(x, op=op)
        assert np.isnan(y).tolist() == [False, True, False]
        assert y[2] == math.inf


def test_reductions_propagate_nan_and_infinity(ranks):
    ranks.run(check_nan)


def check_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.full(9, hvd.rank() + 1, ml_dtypes.bfloat16)
    total = hvd.size() * (hvd.size() + 1) / 2
    y = hvd.allreduce(x, op=hvd.Sum)
    assert y.dtype == ml_dtypes.bfloat16
    assert (y.astype("f4") == total).all()


def test_bfloat16_operations(ranks):
    pytest.importorskip("ml_dtypes")
    ranks.run(check_bfloat16)


def check_layouts():
    rank, size = hvd.rank(), hvd.size()
    x = np.arange(24.0).reshape(2, 3, 4) + rank
    mean = np.arange(24.0).reshape(2, 3, 4) + (size - 1) / 2
    for view in (np.s_[:], np.s_[:, :, ::2], np.s_[::-1], np.s_[:, 1]):
        same(hvd.allreduce(x[view]), mean[view], "float64")
    same(hvd.allreduce(x.T), mean.T, "float64")
    same(hvd.allreduce(np.asfortranarray(x)), mean, "float64")
    # Numbers and lists are converted to arrays.
    assert hvd.allreduce(float(rank), op=hvd.Sum) == size * (size - 1) / 2
    assert hvd.allgather([rank, rank]).tolist() == [r for r in range(size) for _ in range(2)]
    assert hvd.allreduce(np.float32(3)).dtype == np.float32


def test_noncontiguous_arrays_of_any_layout(ranks):
    ranks.run(check_layouts)


def check_objects():
    rank, size = hvd.rank(), hvd.size()
    mine = {"rank": rank, "text": "x" * rank * 1000, "function": lambda v: v + rank}
    for n, each in enumerate(hvd.allgather_object(mine, name="mine")):
        assert (each["rank"], len(each["text"]), each["function"](1)) == (n, n * 1000, n + 1)
    for root in range(size):
        got = hvd.broadcast_object(mine if rank == root else None, root)
        assert got["rank"] == root
    assert hvd.broadcast_object({1, 2}, name="set") == {1, 2}


@pytest.mark.short("aa")
def test_broadcast_and_allgather_of_objects(ranks):
    ranks.run(check_objects)


def check_barrier(folder):
    """No rank leaves a barrier before the last one has entered it."""
    for number in range(20):
        (folder / f"{number}.{hvd.rank()}").touch()
        hvd.barrier()
        assert len(list(folder.glob(f"{number}.*"))) == hvd.size()
    hvd.barrier(process_set=hvd.global_process_set)


@pytest.mark.short("aa")
def test_barrier_waits_for_every_rank(ranks, tmp_path):
    ranks.run(check_barrier, tmp_path)


def check_rank_and_size(hosts):
    rank, size = hvd.rank(), hvd.size()
    assert size == len(hosts)
    mine = [r for r in range(size) if hosts[r] == hosts[rank]]
    assert (hvd.local_rank(), hvd.local_size()) == (mine.index(rank), len(mine))
    peers = [h for h in dict.fromkeys(hosts) if hosts.count(h) > hvd.local_rank()]
    assert (hvd.cross_rank(), hvd.cross_size()) == (peers.index(hosts[rank]), len(peers))
    assert hvd.is_homogeneous() == (len({hosts.count(h) for h in hosts}) == 1)
    everyone = hvd.global_process_set
    assert everyone.process_set_id == 0
    assert (everyone.rank(), everyone.size(), everyone.included()) == (rank, size, True)
    assert everyone.ranks == list(range(size))
    return rank


@pytest.mark.parametrize("hosts", PLACES)
@pytest.mark.short("aab")
def test_rank_and_size_functions(pool, hosts):
    with pool.ranks(len(hosts), hosts=hosts) as job:
        assert job.run(check_rank_and_size, hosts) == list(range(len(hosts)))


# ---- signatures and constants ---------------------------------------------------------------------------------------

TENSOR_ARGUMENTS = {
    "allreduce": "average name op prescale_factor postscale_factor process_set",
    "allgather": "name process_set",
    "broadcast": "root_rank name process_set",
    "alltoall": "splits name process_set",
    "reducescatter": "name op process_set prescale_factor postscale_factor",
    "reduce": "root_rank op name process_set prescale_factor postscale_factor",
    "gather": "root_rank name process_set",
    "scatter": "root_rank splits name process_set",
    "send": "dest tag name process_set",
    "recv": "source tag name process_set",
}


def test_variants_of_an_operation_share_one_signature():
    """The variants of an operation share a signature; each has its own name, documentation and module."""
    variants = {
        "allreduce": "{} {}_async {}_ {}_async_ grouped_{} grouped_{}_async grouped_{}_ grouped_{}_async_",
        "allgather": "{} {}_async grouped_{} grouped_{}_async",
        "broadcast": "{} {}_async {}_ {}_async_",
        "alltoall": "{} {}_async",
        "reducescatter": "{} {}_async grouped_{} grouped_{}_async",
        "reduce": "{} {}_async {}_ {}_async_",
        "gather": "{} {}_async",
        "scatter": "{} {}_async",
        "send": "{} {}_async",
        "recv": "{} {}_async",
    }
    for operation, names in variants.items():
        for name in names.replace("{}", operation).split():
            function = getattr(hvd, name)
            assert (function.__name__, function.__module__) == (name, "horoplug.numpy.operations")
            assert "HorovodInternalError" in function.__doc__
            first, *rest = inspect.signature(function).parameters
            assert first == ("tensors" if name.startswith("grouped") else "tensor")
            assert rest == TENSOR_ARGUMENTS[operation].split()
            assert name in dir(hvd)


@pytest.mark.short
def test_built_functions_and_reduction_constants():
    assert hvd.gloo_built() is True
    assert isinstance(hvd.nccl_built(), int)
    assert hvd.mpi_built() == (importlib.util.find_spec("mpi4py") is not None)
    assert hvd.cuda_built() is True
    assert not any((hvd.rocm_built(), hvd.ddl_built(), hvd.ccl_built()))
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == tuple(range(6))
