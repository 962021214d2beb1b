"""horoplug.jax: results of each operation outside and inside of jax.jit, compared with NumPy."""

from unittest.mock import patch

import numpy as np
import pytest

from tests.harness.checks.jax_ops import (
    WRAPPERS,
    check_refusals,
    check_rows,
    check_sets,
    check_shapes,
    check_trees,
    folded,
    inputs,
    same,
)
from tests.harness.support import ranks_fixture, seed

jax = pytest.importorskip("jax")
hvd = pytest.importorskip("horoplug.jax")
CastCompressor = pytest.importorskip("horoplug.jax.compression").CastCompressor
jnp = jax.numpy

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aab")

DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "uint32", "float16", "bfloat16", "float32"]
WIDE = ["int64", "uint64", "float64"]


def every_operation(x):
    return [
        *(hvd.allreduce(x, op=op) for op in KINDS),
        hvd.allgather(x),
        hvd.broadcast(x, hvd.size() - 1),
        hvd.alltoall(x),
        hvd.reducescatter(x, op=hvd.Sum),
    ]


def check_dtypes(key):
    rank, size = hvd.rank(), hvd.size()
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    for dtype in DTYPES + WIDE:
        with x64(dtype in WIDE):
            of_all = inputs(key, (size, 3), dtype)
            mine = of_all[rank]
            expected = [
                *(folded(of_all, fold) for fold in KINDS.values()),
                np.concatenate(of_all),
                of_all[-1],
                np.stack([np.asarray(x)[rank] for x in of_all]),
                folded(of_all, np.add)[rank : rank + 1],
            ]
            for compiled in WRAPPERS:
                for result, value in zip(compiled(every_operation)(mine), expected, strict=True):
                    same(result, value)
    flags = jnp.asarray([rank == 0, True, False])
    for compiled in WRAPPERS:
        same(compiled(lambda x: hvd.allreduce(x, op=hvd.Max))(flags), [True, True, False])
        same(compiled(lambda x: hvd.allreduce(x, op=hvd.Min))(flags), [size == 1, True, False])
        with pytest.raises(ValueError, match="bool has no average"):
            compiled(hvd.allreduce)(flags)


KINDS = {hvd.Sum: np.add, hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}


@pytest.mark.short("aab")
def test_every_dtype_matches_numpy(ranks):
    ranks.run(check_dtypes, seed())


@pytest.mark.short("aab")
def test_every_shape_matches_numpy(ranks):
    ranks.run(check_shapes, seed())


def check_compression(key):
    """The core casts float32 to the same bits as JAX, which casts for classes derived from a compressor."""
    x = jax.random.normal(jax.random.key(key + hvd.rank()), (50, 9))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):

        def reduce(x, by):
            return hvd.allreduce({"x": x, "count": jnp.arange(3)}, compression=by, op=hvd.Sum)["x"]

        own = type("Own", (compression,), {})
        expected = reduce(x, own)
        assert not np.array_equal(expected, hvd.allreduce(x, op=hvd.Sum)), (
            "compression must change the result of this test's inputs"
        )
        same(reduce(x, compression), expected)
        same(jax.jit(reduce, static_argnames="by")(x, by=compression), expected)
        with patch.object(CastCompressor, "_cast", side_effect=AssertionError):
            same(hvd.allreduce(x, compression=compression, op=hvd.Sum), expected)
        gradients = [
            jax.jit(jax.grad(lambda x, by=by: (reduce(x, by) * x).sum()))(x)
            for by in (compression, own)
        ]
        np.testing.assert_array_equal(*gradients)


def test_core_casts_like_jax(ranks):
    ranks.run(check_compression, seed())


def check_names_that_come_again():
    """Operations under one name that differ in everything else."""
    size = hvd.size()

    def reduce(x, op, factor):
        return hvd.allreduce(x, op=op, name="again", prescale_factor=factor)

    compiled = jax.jit(reduce, static_argnames=("op", "factor"))
    for shape in ((3,), (2, 3), (3,), ()):
        for function in (reduce, compiled):
            for op, factor, expected in (
                *((hvd.Sum, 1.0, size), (hvd.Min, 1.0, 1), (hvd.Sum, 2.0, 2 * size)),
                (hvd.Sum, 1.0, size),
            ):
                same(
                    function(jnp.ones(shape), op=op, factor=factor), np.full(shape, expected, "f4")
                )
        for root in range(size):
            made = hvd.broadcast(jnp.full(shape, hvd.rank()), root, name="again")
            same(made, np.full(shape, root, "i4"))


def test_a_name_comes_again_with_another_operation(ranks):
    ranks.run(check_names_that_come_again)


def test_pytrees_of_several_dtypes(ranks):
    ranks.run(check_trees, seed())


def test_different_rows_per_rank(ranks):
    ranks.run(check_rows)


@pytest.mark.short(failure=True)
def test_invalid_calls_raise(ranks):
    ranks.run(check_refusals)


@pytest.mark.short("aa*")
def test_process_sets_and_join(ranks):
    ranks.run(check_sets)


def check_state():
    """broadcast_parameters, broadcast_optimizer_state and the functions for objects."""
    optax = pytest.importorskip("optax")
    rank, size = hvd.rank(), hvd.size()
    params = {
        "w": jnp.full((3, 2), rank, jnp.float32),
        "b": jnp.full(2, rank, jnp.bfloat16),
        "numpy": np.full(3, rank + 1e-12),  # float64, which JAX would convert to float32
        "key": jax.random.key(rank),
        "rate": 0.5 + rank,
        "text": f"rank {rank}",
    }
    root = size - 1
    got = hvd.broadcast_parameters(params, root_rank=root)
    same(got["w"], np.full((3, 2), root, np.float32))
    same(got["b"], np.full(2, root, jnp.bfloat16))
    assert isinstance(got["numpy"], np.ndarray)
    assert got["numpy"].tolist() == [root + 1e-12] * 3
    assert (got["rate"], got["text"]) == (0.5 + root, f"rank {root}")
    assert jax.random.normal(got["key"]) == jax.random.normal(jax.random.key(root))
    weights = {"w": params["w"], "b": params["b"]}
    optimizer = optax.adam(1e-3)
    _, state = optimizer.update(weights, optimizer.init(weights), weights)
    state = hvd.broadcast_optimizer_state(state, root_rank=0)
    bits = jax.tree_util.tree_map(lambda x: np.asarray(x).tobytes(), state)
    assert hvd.allgather_object(bits) == [bits] * size
    assert not np.asarray(state[0].mu["w"]).any()  # rank 0's
    assert hvd.broadcast_object({"epoch": rank}, root) == {"epoch": root}
    with pytest.raises(TypeError, match=r"use hvd\.broadcast"):
        jax.jit(hvd.broadcast_parameters)(weights)


@pytest.mark.short("aa*")
def test_broadcast_of_parameters_and_objects(ranks):
    ranks.run(check_state)
