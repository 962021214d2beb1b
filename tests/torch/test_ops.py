"""Every operation on PyTorch tensors: dtypes, compression, sparse tensors, layouts, invalid calls."""

import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch

import horoplug.torch as hvd
from horoplug.common import stubs
from tests.harness import ROOT
from tests.harness.cases import allreduce_test, exchanged
from tests.harness.checks.arrays import arrays, reduced, shapes
from tests.harness.checks.errors import refused
from tests.harness.support import ranks_fixture, seed

pytest_plugins = ["tests.harness.jobs"]

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "uint16",
    "uint32",
    "uint64",
]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-6, "float64": 1e-14}
PLACES = ["a", "aa", "ab", "aab", "aaaa", "abab"]


ranks = ranks_fixture(*PLACES)


def tensors(dtype, shape, key, size):
    """The tensor of every rank, and the same values as arrays."""
    made = arrays("float32" if dtype == "bfloat16" else dtype, shape, key, size)
    made = [torch.from_numpy(a).to(getattr(torch, dtype)) for a in made]
    return made, [t.float().numpy() if dtype == "bfloat16" else t.numpy() for t in made]


def same(actual, expected, dtype):
    assert type(actual) is torch.Tensor
    assert actual.dtype == getattr(torch, dtype)
    assert actual.shape == np.shape(expected)
    assert not actual.requires_grad
    actual = actual.double() if dtype in FLOATS else actual
    np.testing.assert_allclose(
        actual.numpy().astype("float64"),
        np.asarray(expected).astype("float64"),
        TOLERANCE.get(dtype, 0),
    )


def bits(tensor):
    return tensor.clone().reshape(-1, 1).view(torch.uint8).numpy().tobytes()


def check_allreduce(dtype, op, key):
    size, rank = hvd.size(), hvd.rank()
    seen = []
    for shape in shapes(key):
        inputs, values = tensors(dtype, shape, key, size)
        kind = "float64" if dtype == "bfloat16" else dtype
        expected = reduced(values, op, kind)
        mine = inputs[rank].clone()
        output = hvd.allreduce(mine, op=op)
        same(output, expected, dtype)
        assert torch.equal(mine, inputs[rank]), "the input was changed"
        assert hvd.allreduce_(mine, op=op) is mine
        same(mine, expected, dtype)
        handle = hvd.allreduce_async(inputs[rank], op=op, name=f"a{shape}")
        assert isinstance(handle, int)
        same(hvd.synchronize(handle), expected, dtype)
        mine = inputs[rank].clone()
        assert hvd.synchronize(hvd.allreduce_async_(mine, op=op)) is mine
        same(mine, expected, dtype)
        seen += [bits(output), bits(mine)]
    return seen


test_allreduce = pytest.mark.short("aa-*-float32")(allreduce_test(check_allreduce, DTYPES))


def check_data_movement(dtype, key):
    size, rank = hvd.size(), hvd.rank()
    kind = "float64" if dtype == "bfloat16" else dtype

    rows, values = tensors(dtype, (size + 1, 3), key, size)
    same(
        hvd.allgather(rows[rank][: rank + 1]),
        np.concatenate([v[: r + 1] for r, v in enumerate(values)]),
        dtype,
    )
    same(hvd.allgather(rows[rank][0, 0]), np.stack([v[0, 0] for v in values]), dtype)
    group = hvd.grouped_allgather([rows[rank], rows[rank][:0], rows[rank][:, 0]])
    for output, cut in zip(group, (np.s_[:], np.s_[:0], np.s_[:, 0]), strict=True):
        same(output, np.concatenate([v[cut] for v in values]), dtype)

    for root in range(size):
        mine = rows[rank].clone()
        same(hvd.broadcast(mine, root), values[root], dtype)
        assert torch.equal(mine, rows[rank]), "the input was changed"
        assert hvd.broadcast_(mine, root) is mine
        same(mine, values[root], dtype)

    splits, parts = exchanged(values, rank)
    mine = rows[rank][: sum(splits)]
    for given in (splits, torch.tensor(splits, dtype=torch.int32), torch.tensor(splits)):
        output, received = hvd.alltoall(mine, given)
        same(output, np.concatenate(parts), dtype)
        assert received.dtype == torch.int32
        assert received.tolist() == splits
    even = rows[rank][:size]
    expected = np.stack([v[rank] for v in values])
    same(hvd.alltoall(even), expected, dtype)
    output, received = hvd.synchronize(hvd.alltoall_async(even))
    same(output, expected, dtype)
    assert received.tolist() == [1] * size

    if dtype != "bool":
        cut = np.s_[:2] if rank == 0 else np.s_[rank + 1 : rank + 2]
        for op in (hvd.Average, hvd.Sum):
            expected = reduced(values, op, kind)[cut]
            same(hvd.reducescatter(rows[rank], op=op), expected, dtype)
            same(hvd.synchronize(hvd.reducescatter_async(rows[rank], op=op)), expected, dtype)
            for output in hvd.grouped_reducescatter([rows[rank]] * 2, op=op):
                same(output, expected, dtype)

    for grouped, args in (
        (hvd.grouped_allreduce, ()),
        (lambda x, **k: hvd.synchronize(hvd.grouped_allreduce_async(x, **k)), ()),
        (hvd.grouped_allreduce_, ()),
    ):
        group = [rows[rank].clone(), rows[rank][:1].clone(), rows[rank][:0].clone()]
        outputs = grouped(group, *args, op=hvd.Sum)
        for output, count in zip(outputs, (size + 1, 1, 0), strict=True):
            same(output, reduced(values, hvd.Sum, kind)[:count], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.short("aa-float32")
def test_data_movement_operations(ranks, dtype):
    ranks.run(check_data_movement, dtype, seed())


# ---- compression, sparse tensors, layouts, invalid calls ------------------------------------------------------------


def check_compression():
    size, rank = hvd.size(), hvd.rank()

    class Halved:
        """A compressor that is not derived from Compressor."""

        @staticmethod
        def compress(tensor):
            return tensor / 2, "kept"

        @staticmethod
        def decompress(tensor, ctx):
            assert ctx == "kept"
            return tensor * 2

    x = torch.full((9,), rank + 1.0, requires_grad=True)
    whole = torch.arange(9)
    for compression in (
        hvd.Compression.none,
        hvd.Compression.fp16,
        hvd.Compression.bf16,
        Halved,
    ):
        y = hvd.allreduce(x, compression=compression)
        assert y.dtype == torch.float32
        assert torch.equal(y, torch.full((9,), (size + 1) / 2))
        x.grad = None
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones(9))
        assert hvd.allreduce(whole, None, None, compression).dtype == (
            torch.float32 if compression is Halved else torch.int64
        )
        (y,) = hvd.grouped_allreduce([x], compression=compression, op=hvd.Sum)
        assert torch.equal(y, torch.full((9,), size * (size + 1) / 2))
        y = hvd.reducescatter(x.repeat(size), None, compression, hvd.Sum)
        assert torch.equal(y, torch.full((9,), size * (size + 1) / 2))
        (y,) = hvd.grouped_reducescatter([x.repeat(size)], compression=compression)
        assert torch.equal(y, torch.full((9,), (size + 1) / 2))


@pytest.mark.short("aa")
def test_allreduce_with_compression(ranks):
    ranks.run(check_compression)


def check_sparse():
    size, rank = hvd.size(), hvd.rank()
    indices = torch.tensor([[rank, 5, 5]])
    values = torch.tensor([[1.0, 2.0], [rank, rank], [1, 1]])
    x = torch.sparse_coo_tensor(indices, values, (6, 2))
    dense = torch.zeros(6, 2)
    for r in range(size):
        dense[r] += torch.tensor([1.0, 2.0])
        dense[5] += r + 1
    finish = hvd.sparse_allreduce_async(x, name="sparse", op=hvd.Sum)
    assert hvd.synchronize(finish) is None
    assert torch.equal(finish().to_dense(), dense)
    finish = hvd.sparse_allreduce_async(x, None, hvd.Average)
    torch.testing.assert_close(finish().to_dense(), dense / size)


@pytest.mark.short("aa")
def test_sparse_allreduce(ranks):
    ranks.run(check_sparse)


def check_layouts():
    rank, size = hvd.rank(), hvd.size()
    x = torch.arange(48.0).reshape(2, 3, 2, 4) + rank
    mean = torch.arange(48.0).reshape(2, 3, 2, 4) + (size - 1) / 2
    for view in (lambda t: t.transpose(1, 3), lambda t: t[..., ::2], lambda t: t[1]):
        assert torch.equal(hvd.allreduce(view(x)), view(mean))
    assert torch.equal(hvd.allreduce(x.to(memory_format=torch.channels_last)), mean)
    assert torch.equal(hvd.allreduce(torch.ones(1).expand(5)), torch.ones(5))
    whole = torch.zeros(4, 3)
    hvd.allreduce_(whole[1:3].fill_(rank), op=hvd.Sum)  # a view of a part of a tensor
    assert whole.sum() == 6 * sum(range(size))
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    assert hvd.broadcast_(parameter, size - 1) is parameter
    assert (parameter == size - 1).all()


def test_tensors_of_every_layout(ranks):
    ranks.run(check_layouts)


VIEWS = {
    "transposed": lambda t: t.transpose(1, 3),
    "strided": lambda t: t[..., ::2],
    "offset": lambda t: t[1, 1:],
    "column": lambda t: t[:, 1, 0, 3],
    "narrow": lambda t: t.narrow(1, 1, 2),
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "negated": torch._neg_view,
    "conjugated": torch.conj,  # the tensor itself unless it is complex
    "empty": lambda t: t[:, :0].transpose(1, 2),
    "scalar": lambda t: t[0, 1, 1, 2],
    "windows": lambda t: t.flatten().unfold(0, 6, 7),
}


def check_views(dtype):
    """All strided tensors are supported, and in-place operations write to the tensor itself."""
    rank, size = hvd.rank(), hvd.size()
    dtype = getattr(torch, dtype)
    start = torch.arange(48).reshape(2, 3, 2, 4).to(dtype)
    if dtype.is_complex:
        start = start * (1 + 2j)
    for name, view in VIEWS.items():
        mine = [view(start + r) for r in range(size)]
        total, x, shape = sum(mine), mine[rank], mine[rank].shape

        def same(output, expected, name=name):
            assert output.dtype == dtype
            assert torch.equal(output, expected), name

        same(hvd.allreduce(x, op=hvd.Sum), total)
        same(hvd.broadcast(x, size - 1), mine[-1])
        if shape:
            same(hvd.allgather(x), torch.cat(mine))
            same(
                hvd.alltoall(x, [len(x)] + [0] * (size - 1))[0][: len(x) if rank == 0 else 0],
                mine[0][: len(x) if rank == 0 else 0],
            )
            rows = len(x) // size + (rank < len(x) % size)
            before = sum(len(x) // size + (r < len(x) % size) for r in range(rank))
            same(hvd.reducescatter(x, op=hvd.Sum), total[before : before + rows])
        same(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)), total)
        assert torch.equal(x, view(start + rank)), "the input was changed"

        whole = (start + rank).clone(memory_format=torch.preserve_format)
        for operation, expected in (
            (lambda x: hvd.allreduce_(x, op=hvd.Sum), total),
            (lambda x: hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Sum)), total),
            (lambda x: hvd.broadcast_(x, 0), mine[0]),
        ):
            whole.copy_(start + rank)
            x = view(whole)
            assert operation(x) is x
            same(x, expected)
            if x.numel() and name != "channels last":
                assert x.data_ptr() == view(whole).data_ptr(), "it has other memory"
        others = torch.ones_like(start, dtype=torch.bool)
        if name not in ("channels last", "negated"):
            view(others).fill_(False)
            assert torch.equal(whole[others], (start + rank)[others]), "more was overwritten"
        group = [view((start + rank).clone()) for _ in range(2)] + [torch.ones(2, dtype=dtype)]
        outputs = hvd.grouped_allreduce_(group, op=hvd.Sum)
        assert all(output is x for output, x in zip(outputs, group, strict=True))
        same(group[1], total)
        mixed = [view((start + rank).clone()), torch.ones(3, dtype=torch.int64)]
        hvd.grouped_allreduce_(mixed, op=hvd.Sum)
        same(mixed[0], total)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64"])
def test_strided_views(ranks, dtype):
    ranks.run(check_views, dtype)


def check_gradients_of_views():
    x = torch.randn(4, 3, requires_grad=True)
    hvd.allreduce(x.t(), op=hvd.Sum).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 3), float(hvd.size())))
    x = torch.randn(3, requires_grad=True)
    hvd.allgather(x.expand(2, 3)).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_gradients_of_views(ranks):
    ranks.run(check_gradients_of_views)


def check_refusals():
    x = torch.ones(4, 3)
    refused(
        ValueError,
        "float8_e4m3fnuz is not supported.*float32",
        lambda: hvd.allreduce(x.to(torch.float8_e4m3fnuz)),
    )
    refused(TypeError, "expected a torch.Tensor, got ndarray", lambda: hvd.allreduce(x.numpy()))
    refused(TypeError, "expected a torch.Tensor, got float", lambda: hvd.allreduce_async(1.0))
    row = torch.ones(1, 3).expand(4, 3)
    refused(ValueError, "share memory.*new tensor", lambda: hvd.allreduce_(row))
    windows = torch.ones(6).unfold(0, 3, 1)
    refused(ValueError, "share memory", lambda: hvd.broadcast_async_(windows, 0))
    refused(ValueError, "on meta; horoplug supports", lambda: hvd.allreduce(x.to("meta")))
    refused(ValueError, "sparse_coo.*to_dense", lambda: hvd.allreduce(x.to_sparse()))
    refused(ValueError, "bool has no average", lambda: hvd.allreduce(x > 0))
    refused(ValueError, "scalar", lambda: hvd.reducescatter(x.sum()))
    refused(ValueError, "not Product", lambda: hvd.reducescatter(x, op=hvd.Product))
    refused(
        ValueError, "one integer for each", lambda: hvd.alltoall(x, splits=torch.ones(hvd.size()))
    )
    refused(ValueError, "one integer for each", lambda: hvd.alltoall(x, splits="all"))
    nested = torch.nested.nested_tensor([x[0], x[0, :2]])
    refused(ValueError, "nested; pass .*to_padded_tensor", lambda: hvd.allgather(nested))
    refused(TypeError, "str; use broadcast_object", lambda: hvd.broadcast("text", 0))
    refused(TypeError, "compression= takes Compr", lambda: hvd.allreduce(x, compression="fp16"))
    refused(TypeError, "root_rank= takes an integer", lambda: hvd.broadcast_async_(x, "0"))
    refused(TypeError, "root_rank= takes an integer", lambda: hvd.broadcast_parameters([x], None))
    grad = x.clone().requires_grad_()
    refused(TypeError, "scale_factor= takes a num", lambda: hvd.allreduce(grad, prescale_factor=""))
    refused(TypeError, "takes a list", lambda: hvd.grouped_allreduce(x))
    refused(TypeError, "compression", lambda: hvd.allreduce_(x, compression=hvd.Compression.fp16))
    refused(ValueError, "supersedes", lambda: hvd.allreduce(x, average=False, op=hvd.Sum))
    assert (hvd.allreduce(x) == 1).all()


@pytest.mark.short("aa", failure=True)
def test_invalid_calls_are_refused(ranks):
    ranks.run(check_refusals)


def check_kept_alive(key):
    """Tensors without references stay alive until the core is done with them."""
    size = hvd.size()
    handles = []
    for n in range(50):
        x = torch.full((3000,), float(n))
        handles.append(hvd.allreduce_async(x, op=hvd.Sum, name=f"kept{n}"))
        handles.append(hvd.allgather_async(x + 1, name=f"kept{n}"))
        del x
        torch.full((3000,), -1.0)  # would reuse the memory of a freed tensor
    for n in range(50):
        assert (hvd.synchronize(handles[2 * n]) == n * size).all()
        assert (hvd.synchronize(handles[2 * n + 1]) == n + 1).all()
    from horoplug.common.context import context

    assert not context.operations, "finished operations keep nothing"
    assert not context.blocking
    outputs = [hvd.allgather(torch.full((100,), float(n))) for n in range(20)]
    assert [o[0].item() for o in outputs] == list(range(20)), "outputs own their memory"


def test_tensors_are_kept_alive(ranks):
    ranks.run(check_kept_alive, 0)


@pytest.mark.short
def test_signatures_are_horovods():
    """The arguments are Horovod's, followed by horoplug's own."""
    expected = {
        "allreduce": "tensor average=None name=None compression=C op=None prescale_factor=1.0 postscale_factor=1.0 ps",
        "allreduce_async": "tensor average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 ps",
        "allreduce_": "tensor average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 ps",
        "grouped_allreduce": "tensors average=None name=None compression=C op=None prescale_factor=1.0 "
        "postscale_factor=1.0 ps",
        "grouped_allreduce_async_": "tensors average=None name=None op=None prescale_factor=1.0 "
        "postscale_factor=1.0 ps",
        "allgather": "tensor name=None ps",
        "grouped_allgather_async": "tensors name=None ps",
        "broadcast": "tensor root_rank name=None ps",
        "broadcast_async_": "tensor root_rank name=None ps",
        "alltoall": "tensor splits=None name=None ps",
        "reducescatter": "tensor name=None compression=C op=0 ps prescale_factor=1.0 postscale_factor=1.0",
        "reducescatter_async": "tensor name=None op=0 ps prescale_factor=1.0 postscale_factor=1.0",
        "grouped_reducescatter": "tensors name=None compression=C op=0 ps prescale_factor=1.0 "
        "postscale_factor=1.0",
        "sparse_allreduce_async": "tensor name op ps",
        "broadcast_object": "obj root_rank=0 name=None ps",
        "allgather_object": "obj name=None ps",
        "broadcast_parameters": "params root_rank ps",
        "broadcast_optimizer_state": "optimizer root_rank model=None ps",
        "DistributedOptimizer": "optimizer named_parameters=None compression=C backward_passes_per_step=1 op=0 "
        "gradient_predivide_factor=1.0 num_groups=0 groups=None sparse_as_dense=False ps "
        "gradient_as_bucket_view=None",
        "init": "comm=None process_sets=None",
    }
    short = {id(hvd.global_process_set): "ps", id(hvd.Compression.none): "C"}
    for name, text in expected.items():
        shown = []
        for p in inspect.signature(getattr(hvd, name)).parameters.values():
            default = short.get(id(p.default), repr(p.default))
            if p.default is p.empty:
                shown.append(p.name)
            else:
                shown.append("ps" if default == "ps" else f"{p.name}={default}")
        assert " ".join(shown) == text, name
    assert hvd.mpi_ops.allreduce is hvd.allreduce
    assert hvd.allreduce.__module__ == "horoplug.torch.operations"


@pytest.mark.short
def test_stubs_need_neither_frameworks_nor_the_core(tmp_path):
    for framework in stubs.FRAMEWORKS:
        (tmp_path / framework).mkdir()
    command = [sys.executable, "-S", "-m", "horoplug.common.stubs", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True)
    for framework in stubs.FRAMEWORKS:
        made, built = (each / framework / "operations.pyi" for each in (tmp_path, stubs.PACKAGE))
        assert made.read_bytes() == built.read_bytes()


@pytest.mark.short
def test_stubs_are_up_to_date():
    """The stubs describe the generated functions."""
    for framework in ("numpy", "torch"):  # tests/mxnet has MXNet's
        path = stubs.PACKAGE / framework / "operations.pyi"
        assert path.read_text() == stubs.stub_of(framework), "run: make stubs"
