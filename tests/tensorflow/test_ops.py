"""Every operation on TensorFlow's tensors, eagerly and in graphs: dtypes and ranks, order, sparse tensors, errors."""

import random
from unittest.mock import patch

import numpy as np
import pytest

import horoplug as plain
from tests.core.test_numpy_ops import arrays, reduced, shapes
from tests.harness.cases import allreduce_test, exchanged
from tests.harness.support import ranks_fixture, seed

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")
CastCompressor = pytest.importorskip("horoplug.tensorflow.compression").CastCompressor

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
    "bfloat16",
    "float32",
    "float64",
]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-6, "float64": 1e-14}

ranks = ranks_fixture("a", "aa", "ab", "aab")


def both(function):
    """The function as it is, and as a graph."""
    return function, tf.function(function)


def tensors(dtype, shape, key, size):
    """The tensor of every rank, and the same values as arrays."""
    made = arrays("float32" if dtype == "bfloat16" else dtype, shape, key, size)
    made = [tf.cast(a, dtype) if dtype == "bfloat16" else tf.constant(a) for a in made]
    return made, [tf.cast(t, "float32").numpy() if dtype == "bfloat16" else t.numpy() for t in made]


def same(actual, expected, dtype):
    assert isinstance(actual, tf.Tensor)
    assert actual.dtype == dtype
    assert actual.shape == np.shape(expected)
    actual = tf.cast(actual, "float64") if dtype in FLOATS else actual
    np.testing.assert_allclose(
        actual.numpy().astype("float64"),
        np.asarray(expected).astype("float64"),
        TOLERANCE.get(dtype, 0),
    )


def check_allreduce(dtype, op, key):
    size, rank = hvd.size(), hvd.rank()
    seen = []
    for shape in shapes(key):
        inputs, values = tensors(dtype, shape, key, size)
        expected = reduced(values, op, "float64" if dtype == "bfloat16" else dtype)
        mine = inputs[rank]
        before = mine.numpy().tobytes()
        for reduce in both(lambda x: hvd.allreduce(x, op=op)):
            output = reduce(mine)
            same(output, expected, dtype)
            assert mine.numpy().tobytes() == before, "the input was changed"
            seen.append(output.numpy().tobytes())
        same(hvd.allreduce(mine, op=op, name=f"named{shape}"), expected, dtype)
        for output in hvd.grouped_allreduce([mine, mine], op=op):
            same(output, expected, dtype)
    return seen


test_allreduce = allreduce_test(check_allreduce, DTYPES)


def check_others(dtype, key):
    size, rank = hvd.size(), hvd.rank()
    kind = "float64" if dtype == "bfloat16" else dtype
    rows, values = tensors(dtype, (size + 1, 3), key, size)
    mine = rows[rank]

    for gather in both(hvd.allgather):
        expected = np.concatenate([v[: r + 1] for r, v in enumerate(values)])
        same(gather(mine[: rank + 1]), expected, dtype)
        same(gather(mine[0, 0]), np.stack([v[0, 0] for v in values]), dtype)
        same(gather(mine[:0]), np.concatenate([v[:0] for v in values]), dtype)
    for gather in both(hvd.grouped_allgather):
        group = gather([mine, mine[:0], mine[:, 0]])
        for output, cut in zip(group, (np.s_[:], np.s_[:0], np.s_[:, 0]), strict=True):
            same(output, np.concatenate([v[cut] for v in values]), dtype)

    for root in range(size):
        for send in both(lambda x, root=root: hvd.broadcast(x, root)):
            same(send(mine), values[root], dtype)
            same(mine, values[rank], dtype)

    splits, parts = exchanged(values, rank)
    for exchange in both(hvd.alltoall):
        for given in (splits, tf.constant(splits)):
            output, received = exchange(mine, given)
            same(output, np.concatenate(parts), dtype)
            assert received.dtype == tf.int32
            assert received.numpy().tolist() == splits
        same(exchange(mine[:size]), np.stack([v[rank] for v in values]), dtype)

    if dtype != "bool":
        cut = np.s_[:2] if rank == 0 else np.s_[rank + 1 : rank + 2]
        for op in (hvd.Average, hvd.Sum):
            expected = reduced(values, op, kind)[cut]
            for scatter in both(lambda x, op=op: hvd.reducescatter(x, op=op)):
                same(scatter(mine), expected, dtype)
            for scatter in both(lambda x, op=op: hvd.grouped_reducescatter([x, x], op=op)):
                for output in scatter(mine):
                    same(output, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_operations(ranks, dtype):
    ranks.run(check_others, dtype, seed())


def check_compression(key):
    """The core casts float32: to the same bits as TensorFlow, which casts for what derives from a compressor."""
    x = tf.constant(np.random.default_rng([key, hvd.rank()]).normal(size=(50, 9)).astype("float32"))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        own = type("Own", (compression,), {})
        expected = hvd.allreduce(x, compression=own)
        wide = hvd.allreduce(tf.cast(x, tf.float64), compression=own)
        assert not np.array_equal(expected, hvd.allreduce(x)), "there is something to round"
        with patch.object(CastCompressor, "compress", side_effect=AssertionError):
            for reduce in both(lambda t, c=compression: hvd.allreduce(t, compression=c)):
                same(reduce(x), expected.numpy(), "float32")
        y, z = hvd.grouped_allreduce([x, tf.cast(x, tf.float64)], compression=compression)
        same(y, expected.numpy(), "float32")
        same(z, wide.numpy(), "float64")
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            losses = [
                tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum, compression=c) * x)
                for c in (compression, own)
            ]
        np.testing.assert_array_equal(*[tape.gradient(loss, x) for loss in losses])


def test_compression(ranks):
    ranks.run(check_compression, seed())


def check_small_things():
    size, rank = hvd.size(), hvd.rank()
    x = tf.fill([9], rank + 1.0)
    # Floating-point attributes of TensorFlow have too few bits for these.
    factors = {"prescale_factor": 1 / 3, "postscale_factor": 0.1}
    wide = tf.constant([3e10 + 1], tf.float64)
    for reduce in both(lambda t: hvd.allreduce(t, op=hvd.Sum, **factors)):
        np.testing.assert_allclose(reduce(wide), [size * (3e10 + 1) / 30], 1e-15)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        for reduce in both(lambda t, c=compression: hvd.allreduce(t, compression=c)):
            same(reduce(x), [(size + 1) / 2] * 9, "float32")
        y, z = hvd.grouped_allreduce([x, tf.range(3)], compression=compression, op=hvd.Sum)
        same(y, [size * (size + 1) / 2] * 9, "float32")
        same(z, np.arange(3) * size, "int32")
    same(hvd.allreduce(tf.Variable([1.0]), op=hvd.Sum), [size], "float32")
    same(hvd.allreduce(np.ones(2), op=hvd.Sum), [size, size], "float64")

    numbers = lambda: [  # noqa: E731
        hvd.size_op(),
        hvd.rank_op(),
        hvd.local_size_op(),
        hvd.local_rank_op(),
        hvd.process_set_included_op(),
    ]
    for read in both(numbers):
        expected = [size, rank, hvd.local_size(), hvd.local_rank(), 1]
        assert [n.numpy() for n in read()] == expected
    for wait in both(hvd.barrier):
        wait()
    for last in both(hvd.join):
        assert 0 <= last().numpy() < size


def test_small_things(ranks):
    ranks.run(check_small_things)


def check_shapes_in_graphs():
    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec(None)])
    def known(x, y):
        assert hvd.allreduce(x).shape.as_list() == [None, 3]
        assert hvd.broadcast(x[:2], 0).shape.as_list() == [None, 3]
        assert hvd.allgather(x).shape.as_list() == [None, 3]
        assert hvd.allgather(x[0, 0]).shape.as_list() == [None]
        assert hvd.reducescatter(x).shape.as_list() == [None, 3]
        output, received = hvd.alltoall(x, tf.ones([hvd.size()], tf.int32))
        assert output.shape.as_list() == [None, 3]
        assert received.shape.as_list() == [None]
        assert hvd.size_op().shape.as_list() == []
        assert hvd.allreduce(y).shape.rank is None
        with pytest.raises(ValueError, match="rank 1"):
            hvd.reducescatter(x[0, 0])
        return hvd.allreduce(y, op=hvd.Sum) + tf.reduce_sum(hvd.allgather(y))

    size = hvd.size()
    result = known(tf.ones([size, 3]), tf.ones([2, 2]))
    assert result.numpy().tolist() == [[5.0 * size] * 2] * 2


def test_shapes_in_graphs(ranks):
    ranks.run(check_shapes_in_graphs)


def check_any_order(key):
    """Operations that each rank comes to in an order of its own, some of which need the result of others."""
    size, rank = hvd.size(), hvd.rank()
    mine = random.Random(f"{key}/{rank}")
    count = 60

    @tf.function
    def step(x):
        results = {}
        order = list(range(count))
        mine.shuffle(order)
        for i in order:
            y = hvd.allreduce(x + i, op=hvd.Sum, name=f"one{i}")
            results[i] = hvd.broadcast(y + rank, i % size, name=f"two{i}") if i % 3 == 0 else y
        return [results[i] for i in range(count)]

    for turn in range(12):  # a plan is made of what repeats
        outputs = step(tf.fill([5 if turn < 10 else 2000], float(turn)))
        for i, output in enumerate(outputs):
            expected = size * (turn + i) + (i % size if i % 3 == 0 else 0)
            assert (output.numpy() == expected).all(), (turn, i)


def test_any_order(ranks):
    ranks.run(check_any_order, seed())


def check_unused_results():
    """What one rank prints, and the others do not, is no reason to wait for them."""
    rank, size = hvd.rank(), hvd.size()

    @tf.function
    def step(x):
        total = hvd.allreduce(x, op=hvd.Sum)
        gathered = hvd.allgather(x)
        if rank == 0:
            return total + tf.cast(tf.shape(gathered)[0], x.dtype)
        return x

    for _ in range(3):
        expected = 2.0 * size + size if rank == 0 else 1.0
        assert step(tf.ones([2])).numpy().tolist() == [expected] * 2


def test_unused_results(ranks):
    ranks.run(check_unused_results)


def check_control_flow():
    size = hvd.size()

    @tf.function
    def loop(x, turns):
        for _ in tf.range(turns):
            x = hvd.allreduce(x, op=hvd.Sum) / size + 1.0
        return tf.cond(turns > 2, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: x)

    @tf.function
    def nested(x):
        return loop(x, tf.constant(2)) + loop(x, tf.constant(3))

    assert loop(tf.zeros([2]), tf.constant(5)).numpy().tolist() == [5.0 * size] * 2
    assert loop(tf.zeros([2]), tf.constant(1)).numpy().tolist() == [1.0, 1.0]
    assert nested(tf.zeros([2])).numpy().tolist() == [2.0 + 3 * size] * 2


def test_control_flow(ranks):
    ranks.run(check_control_flow)


def check_sparse():
    size, rank = hvd.size(), hvd.rank()
    values = tf.constant([[1.0, 2.0], [rank, rank], [1, 1]])
    indices = tf.constant([rank, 5, 5])
    dense = np.zeros([6, 2])
    for r in range(size):
        dense[r] += [1, 2]
        dense[5] += r + 1
    for op, factor in ((hvd.Sum, 1), (hvd.Average, 1 / size)):
        for reduce in both(
            lambda v, i, op=op: hvd.allreduce(tf.IndexedSlices(v, i, tf.constant([6, 2])), op=op)
        ):
            result = reduce(values, indices)
            assert isinstance(result, tf.IndexedSlices)
            np.testing.assert_allclose(tf.convert_to_tensor(result), dense * factor, 1e-6)
    slices = tf.IndexedSlices(values, indices, tf.constant([6, 2]))
    one, two = hvd.grouped_allreduce([slices, values], op=hvd.Sum)
    np.testing.assert_allclose(tf.convert_to_tensor(one), dense)
    assert two.shape == values.shape
    for more in ({"op": hvd.Max}, {"prescale_factor": 2.0}):
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            hvd.allreduce(slices, **more)


def test_sparse(ranks):
    ranks.run(check_sparse)


def check_names_between_frameworks():
    """The same names mean the same everywhere: one rank has arrays, the others have tensors."""
    rank, size = hvd.rank(), hvd.size()
    for name in ("x", "y/z", "an odd name:0"):
        if rank == 0:
            result = plain.allreduce(np.ones(3, np.float32), op=hvd.Sum, name=name)
            gathered = plain.allgather(np.zeros([1, 2]), name=name)
        else:
            reduce, run = both(lambda x, name=name: hvd.allreduce(x, op=hvd.Sum, name=name))
            result = (reduce if name == "x" else run)(tf.ones(3))
            gathered = hvd.allgather(tf.zeros([1, 2], tf.float64), name=name)
        assert np.asarray(result).tolist() == [size] * 3
        assert gathered.shape == (size, 2)


def test_names_between_frameworks(ranks):
    ranks.run(check_names_between_frameworks)


def check_process_sets():
    rank, size = hvd.rank(), hvd.size()
    last = hvd.add_process_set([size - 1])
    number = last.process_set_id
    for included in both(lambda: hvd.process_set_included_op(number)):
        assert included().numpy() == (rank == size - 1)
    assert hvd.size_op(number).numpy() == 1
    if rank == size - 1:
        for reduce in both(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=last)):
            assert reduce(tf.ones(2)).numpy().tolist() == [1, 1]
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"not in process set {number}"):
            hvd.allreduce(tf.ones(2), process_set=last)
    hvd.remove_process_set(last)
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not exist"):
        hvd.size_op(number)


def test_process_sets(pool):
    with pool.ranks(2) as job:
        job.run(check_process_sets)


# ---- errors ---------------------------------------------------------------------------------------------------------


def error_of(kind, text, call):
    with pytest.raises(kind, match=text):
        call()


def check_mismatches():
    rank = hvd.rank()
    wrong = tf.errors.FailedPreconditionError
    calls = {
        "shape": lambda: hvd.allreduce(tf.ones([rank + 1]), name="shape"),
        "data type": lambda: hvd.allreduce(
            tf.ones(2, tf.float32 if rank == 0 else tf.float64), name="data type"
        ),
        "reduction": lambda: hvd.allreduce(
            tf.ones(2), op=hvd.Sum if rank == 0 else hvd.Max, name="reduction"
        ),
        "root": lambda: hvd.broadcast(tf.ones(2), rank, name="root"),
    }
    for what, call in calls.items():
        for function in both(call):
            error_of(wrong, f"'[a-z]+.{what}'.*ranks? 0.*rank 1", function)
    # The job goes on.
    assert hvd.allreduce(tf.ones(2), op=hvd.Sum).numpy().tolist() == [2, 2]


def test_mismatches(pool):
    with pool.ranks(2) as job:
        job.run(check_mismatches)


def check_refusals():
    size = hvd.size()
    x = tf.ones([4, 3])
    wrong = tf.errors.InvalidArgumentError
    error_of(wrong, "bool has no average|bool tensors", lambda: hvd.allreduce(x > 0))
    error_of(wrong, "at least one dimension", lambda: hvd.reducescatter(1.0))
    error_of(wrong, "first dimension", lambda: hvd.alltoall(1.0))
    error_of(wrong, "one for each rank", lambda: hvd.alltoall(x, [1] * (size + 1)))
    error_of(wrong, "negative", lambda: hvd.alltoall(x, [-1] + [1] * (size - 1)))
    error_of(wrong, "root rank 9", lambda: hvd.broadcast(x, 9))
    error_of((wrong, TypeError), "string|not in the list", lambda: hvd.allreduce(tf.constant("a")))
    error_of(ValueError, "supersedes", lambda: hvd.allreduce(x, average=True, op=hvd.Sum))
    error_of(ValueError, "not Max", lambda: hvd.reducescatter(x, op=hvd.Max))
    error_of(TypeError, "takes a list", lambda: hvd.grouped_allreduce(x))
    error_of(ValueError, "at least one", lambda: hvd.grouped_allgather([]))

    assert (hvd.allreduce(x).numpy() == 1).all()


def test_refusals(pool):
    with pool.ranks(1) as job:
        job.run(check_refusals)


def check_name_in_flight():
    x = tf.ones(2)
    if hvd.rank() == 0:
        handle = plain.allreduce_async(np.ones(2, np.float32), name="same")
        for again in both(lambda: hvd.allreduce(x, name="same")):
            error_of(tf.errors.InvalidArgumentError, "allreduce.same.*still in flight", again)
        plain.barrier()
        plain.synchronize(handle)
    else:
        plain.barrier()
        plain.allreduce(np.ones(2, np.float32), name="same")


def test_name_in_flight(pool):
    with pool.ranks(2) as job:
        job.run(check_name_in_flight)


def check_life():
    """A graph outlives jobs."""
    total, run = both(lambda x: hvd.allreduce(x, op=hvd.Sum) + tf.cast(hvd.size_op(), x.dtype))
    run.get_concrete_function(tf.TensorSpec([2]))
    for turn in range(4):
        size = hvd.size()
        for function in (total, run):
            assert function(tf.ones(2)).numpy().tolist() == [2.0 * size] * 2
        hvd.shutdown()
        for function in (total, run):
            error_of(
                tf.errors.FailedPreconditionError,
                "not been initialized",
                lambda f=function: f(tf.ones(2)),
            )
        if turn < 3:
            hvd.init()


def test_graphs_outlive_jobs(pool):
    with pool.ranks(2) as job:
        job.run(check_life)
