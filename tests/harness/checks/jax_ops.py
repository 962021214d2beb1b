"""Operations on JAX arrays, called at once and inside of jax.jit."""

import warnings

import numpy as np
import pytest

jax = pytest.importorskip("jax")
hvd = pytest.importorskip("horoplug.jax")
CastCompressor = pytest.importorskip("horoplug.jax.compression").CastCompressor
jnp = jax.numpy
sparse = pytest.importorskip("jax.experimental.sparse")

WRAPPERS = [jax.jit, lambda f: f]  # compiled, and not compiled


def inputs(key, shape, dtype):
    """One array for each rank, of small integers, so that results are exact in every dtype."""
    random = np.random.default_rng([key, len(shape)])
    return [jnp.asarray(random.integers(0, 5, shape), dtype) for _ in range(hvd.size())]


def same(result, expected):
    assert isinstance(result, jax.Array)
    expected = np.asarray(expected)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert np.array_equal(np.asarray(result), expected), (result, expected)


def folded(arrays, function):
    total = np.asarray(arrays[0])
    for array in arrays[1:]:
        total = function(total, np.asarray(array)).astype(total.dtype)
    return total


def check_shapes(key):
    """Scalars, empty arrays, large arrays, and sizes that cannot be divided evenly."""
    rank, size = hvd.rank(), hvd.size()
    for shape in [(), (0,), (5, 0), (1,), (7, 3), (1 << 18,)]:
        of_all = inputs(key, shape, "float32")
        for compiled in WRAPPERS:
            mean, joined = compiled(mean_and_joined)(of_all[rank])
            expected = folded(of_all, np.add).astype(np.float32) / np.float32(size)
            assert mean.shape == shape
            np.testing.assert_allclose(np.asarray(mean), expected, rtol=1e-6)
            same(joined, np.concatenate([np.atleast_1d(np.asarray(x)) for x in of_all]))
            if shape:
                whole = folded(of_all, np.add)
                part = compiled(lambda x: hvd.reducescatter(x, op=hvd.Sum))(of_all[rank])
                same(part, np.array_split(whole, size)[rank])


def mean_and_joined(x):
    return hvd.allreduce(x, prescale_factor=2.0, postscale_factor=0.5), hvd.allgather(x)


def check_trees(key):
    """Pytrees of several dtypes that also contain None."""
    rank, size = hvd.rank(), hvd.size()
    tree = {
        "w": jnp.full((3, 2), rank, jnp.float32),
        "half": [jnp.full(4, rank, jnp.bfloat16), jnp.ones((), jnp.bfloat16) * rank],
        "n": (jnp.arange(3) + rank, None),
        "more": jnp.full((2,), 2.0 * rank),
    }
    total = sum(range(size))
    for compiled in WRAPPERS:
        result, gathered, of_root, pairs, shares, *short = compiled(every_tree)(tree)
        assert jax.tree_util.tree_structure(result) == jax.tree_util.tree_structure(tree)
        same(result["w"], np.full((3, 2), total, np.float32))
        same(result["half"][0], np.full(4, total, jnp.bfloat16))
        same(result["half"][1], np.asarray(total, jnp.bfloat16))
        same(result["n"][0], np.arange(3, dtype=np.int32) * size + total)
        same(result["more"], np.full(2, 2.0 * total, np.float32))
        same(gathered["half"][1], np.arange(size).astype(jnp.bfloat16))
        same(of_root["more"], np.zeros(2, np.float32))
        same(pairs[0][1], np.asarray(pairs[0][0]) * 2)
        assert [x.shape for x in pairs[1]] == [(3 * size, 2), (size, 2)]
        for part in shares:
            same(part, np.full((2, 3), size, np.float32))
        for narrow in short:
            assert jax.tree_util.tree_map(jnp.dtype, narrow) == jax.tree_util.tree_map(
                jnp.dtype, tree
            )
            same(narrow["w"], np.full((3, 2), total, np.float32))
        assert compiled(hvd.allreduce)({}) == {}
    # Inputs that are not JAX arrays.
    same(hvd.allreduce(np.arange(3.0), op=hvd.Sum), np.arange(3, dtype=np.float32) * size)
    same(hvd.allreduce(rank, op=hvd.Sum), np.asarray(total, np.int32))
    for wrong, kind in [("text", TypeError), ([jnp.ones(1), object()], TypeError)]:
        with pytest.raises(kind, match="expected an array"):
            hvd.allreduce(wrong)
    with pytest.raises(TypeError, match="takes a list of arrays"):
        hvd.grouped_allreduce(jnp.ones(3))
    with pytest.raises(ValueError, match="at least one"):
        hvd.grouped_allgather([])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same(hvd.allreduce(jnp.ones(2), average=False), np.full(2, size, np.float32))
    assert any("op=Sum" in str(w.message) for w in caught)


def every_tree(tree):
    w, rows = tree["w"], jnp.ones((hvd.size() * 2, 3))
    return [
        hvd.allreduce(tree, op=hvd.Sum, name="tree"),
        hvd.allgather(tree),
        hvd.broadcast(tree, 0),
        [hvd.grouped_allreduce([w, w * 2], op=hvd.Sum), hvd.grouped_allgather([w, w[:1]])],
        hvd.grouped_reducescatter([rows, rows], op=hvd.Sum),
        hvd.allreduce(tree, op=hvd.Sum, compression=hvd.Compression.fp16),
        hvd.allreduce(tree, op=hvd.Sum, compression=hvd.Compression.bf16),
    ]


def check_rows():
    """Ranks with different numbers of rows are supported outside of compiled programs only."""
    rank, size = hvd.rank(), hvd.size()
    gathered = hvd.allgather(jnp.full((rank + 1, 2), rank))
    same(gathered, np.concatenate([np.full((r + 1, 2), r, np.int32) for r in range(size)]))
    # Rank r sends r + 1 rows to each rank, and one row is left over.
    splits = [rank + 1] * size
    output, received = hvd.alltoall(jnp.full(sum(splits) + 1, rank), splits)
    same(received, np.arange(1, size + 1, dtype=np.int32))
    same(output, np.repeat(np.arange(size), np.arange(1, size + 1)).astype(np.int32))
    # A compiled program needs the same splits on every rank.
    splits = list(range(1, size + 1))
    x = jnp.arange(sum(splits) + 2) + 100 * rank
    expected = hvd.alltoall(x, splits)
    for result, at_once in zip(
        jax.jit(lambda x: hvd.alltoall(x, np.array(splits)))(x), expected, strict=True
    ):
        same(result, at_once)
    if size == 1:
        return
    for call in (
        lambda x: hvd.allgather(x, name="rows"),
        lambda x: hvd.alltoall(x, [2 + rank] * size, name="rows")[0],
    ):
        kind = "all(gather|toall).rows"
        with pytest.raises(
            RuntimeError, match=f"{kind}.*the same number of rows on every rank.*outside"
        ):
            jax.block_until_ready(jax.jit(call)(jnp.ones((12 + rank, 2))))
    with pytest.raises(ValueError, match="not a multiple of"):
        jax.jit(hvd.alltoall)(jnp.ones(size + 1))
    with pytest.raises(TypeError, match="when alltoall is traced"):
        jax.jit(hvd.alltoall)(jnp.ones(size), jnp.ones(size, jnp.int32))
    for compiled in WRAPPERS:
        with pytest.raises(ValueError, match="a scalar has none"):
            compiled(hvd.alltoall)(jnp.ones(()))
        with pytest.raises(ValueError, match="a scalar has none"):
            compiled(hvd.reducescatter)(jnp.ones(()))


def check_refusals():
    for compiled in WRAPPERS:
        for dtype in "int4", "float8_e4m3fnuz":
            with pytest.raises(ValueError, match=f"dtype {dtype} is not supported"):
                compiled(hvd.allreduce)(jnp.ones(2, dtype))
        with pytest.raises(ValueError, match="is not a reduction"):
            compiled(lambda x: hvd.allreduce(x, op=9))(jnp.ones(2))
        with pytest.raises(ValueError, match="reducescatter supports"):
            compiled(lambda x: hvd.reducescatter(x, op=hvd.Max))(jnp.ones(2))
    number = 1 + 2j
    for compiled in WRAPPERS:
        same(compiled(lambda: hvd.allreduce(number))(), np.complex64(number))
        for wrong, kind, match in (
            (np.ma.array([1.0, 2.0], mask=[0, 1]), TypeError, r"masked array.*x\.filled"),
            (
                [jnp.ones(1), sparse.BCOO.fromdense(jnp.eye(2))],
                TypeError,
                "BCOO .* use its todense",
            ),
            ({"a": np.array(["text"])}, ValueError, "dtype <U4 is not supported"),
        ):
            with pytest.raises(kind, match=match):
                compiled(lambda y, wrong=wrong: hvd.allreduce([y, wrong], op=hvd.Sum))(jnp.ones(2))
        for options, match in (
            ({"root_rank": "0"}, "root_rank= takes an integer, got '0'"),
            ({"root_rank": 0, "name": [1]}, "name= takes a string, got list"),
        ):
            with pytest.raises(TypeError, match=match):
                compiled(lambda x, options=options: hvd.broadcast(x, **options))(jnp.ones(2))
        with pytest.raises(TypeError, match="prescale_factor= takes a number"):
            compiled(lambda x: hvd.allreduce(x, prescale_factor=x))(jnp.ones(2))
        with pytest.raises(TypeError, match="compression= takes Compression"):
            compiled(lambda x: hvd.allreduce(x, compression="fp16"))(jnp.ones(2))
    assert repr(jax.make_jaxpr(hvd.allreduce)(jnp.ones(2)).effects) == "{Collective}"
    # Errors that the core finds. In a program only this operation fails.
    with pytest.raises(RuntimeError, match="root rank 99 does not exist"):
        jax.block_until_ready(jax.jit(lambda x: hvd.broadcast(x, 99))(jnp.ones(2)))
    with pytest.raises(ValueError, match="root rank 99 does not exist"):
        hvd.broadcast(jnp.ones(2), 99)
    same(jax.jit(hvd.allreduce)(jnp.ones(2)), np.ones(2, np.float32))
    with pytest.raises(NotImplementedError, match=r"inside of jax\.jit runs on CPUs and on"):
        jax.jit(hvd.allreduce).trace(jnp.ones(2)).lower(lowering_platforms=("tpu",))


def check_sets():
    """Operations on process sets, and join."""
    rank, size = hvd.rank(), hvd.size()
    if size > 2:
        ends = hvd.add_process_set([0, size - 1])
        if ends.included():
            for compiled in WRAPPERS:
                total = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=ends))
                same(total(jnp.full(2, rank)), np.full(2, size - 1, np.int32))
                joined = compiled(lambda x: hvd.allgather(x, process_set=ends))
                same(joined(jnp.full(1, rank)), np.array([0, size - 1], np.int32))
        else:
            with pytest.raises(ValueError, match="is not in ProcessSet"):
                jax.jit(lambda x: hvd.allgather(x, process_set=ends))(jnp.ones(1))
        hvd.remove_process_set(ends)
    step = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    for _ in range(rank):  # rank 0 joins at once
        step(jnp.ones(2))
    assert hvd.join() in range(size)
    hvd.barrier()
