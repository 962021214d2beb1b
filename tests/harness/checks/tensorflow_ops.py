"""Operations on TensorFlow tensors, eagerly and in graphs."""

import numpy as np
import pytest

import horoplug as plain
from tests.harness.cases import exchanged
from tests.harness.checks.arrays import arrays, reduced, shapes
from tests.harness.checks.errors import refused

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")
CastCompressor = pytest.importorskip("horoplug.tensorflow.compression").CastCompressor

FLOATS = ["float16", "bfloat16", "float32", "float64"]

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-6, "float64": 1e-14}


def both(function):
    """The function itself, and as a graph."""
    return function, tf.function(function)


def tensors(dtype, shape, key, size):
    """The tensors of all ranks, and the same values as arrays."""
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


def check_data_movement(dtype, key):
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


def check_factors_names_and_queries():
    size, rank = hvd.size(), hvd.rank()
    x = tf.fill([9], rank + 1.0)
    # Values that do not fit TensorFlow's 32-bit floating-point attributes.
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


def check_unused_results():
    """An operation whose result is used on one rank only runs on all ranks."""
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
    if size == 1:
        return
    last = rank == size - 1
    here = tf.constant([0, 1, 4])
    for name, shape, dtype, op, sides in (
        ("rows", [9 if last else 5, 2], tf.float32, hvd.Sum, r"\(5, 2\).* but .*\(9, 2\)"),
        ("rank", [5, 2] if last else [5], tf.float32, hvd.Sum, r"\(5,\).* but .*\(5, 2\)"),
        ("type", [5, 2], tf.float64 if last else tf.float32, hvd.Sum, "float32.* but .*float64"),
        ("op", [5, 2], tf.float32, hvd.Sum if last else hvd.Average, "Average.* but .*Sum"),
    ):
        given = tf.cast(values[:, 0] if len(shape) == 1 else values, dtype)
        for reduce in both(
            lambda given=given, shape=shape, op=op, name=name: hvd.allreduce(
                tf.IndexedSlices(given, here, tf.constant(shape)), op=op, name=name
            )
        ):
            text = f"'allgather.{name}.[a-z]+': mismatched layout: tf.IndexedSlices of .*{sides}"
            error_of(tf.errors.FailedPreconditionError, text, reduce)
    assert hvd.allreduce(slices, name="rows").dense_shape.numpy().tolist() == [6, 2]


def check_names_between_frameworks():
    """Operations on arrays and on tensors are matched by name."""
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
    # The job continues.
    assert hvd.allreduce(tf.ones(2), op=hvd.Sum).numpy().tolist() == [2, 2]


def check_inputs():
    """Inputs that are no dense tensors, and options of a wrong kind: the error is one line that names them."""
    x = tf.ones(2)
    ragged, sparse = tf.ragged.constant([[1.0], [1.0, 2.0]]), tf.sparse.eye(2)
    for wrong, kind, text in (
        (ragged, TypeError, r"RaggedTensor; pass x.to_tensor"),
        (sparse, TypeError, r"SparseTensor; pass tf.sparse.to_dense"),
        (np.ma.array([1.0, 2.0], mask=[0, 1]), TypeError, r"masked array.*x\.filled"),
        (None, TypeError, "expected a tensor, got NoneType"),
        ("text", ValueError, "dtype string is not supported"),
        ([[1.0], [1.0, 2.0]], ValueError, "the list cannot be made a tensor"),
    ):
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            refused(kind, text, lambda call=call, wrong=wrong: call(wrong))
        refused(kind, text, lambda wrong=wrong: hvd.broadcast(wrong, 0))
        refused(kind, text, lambda wrong=wrong: hvd.grouped_allreduce([x, wrong]))
    vocabulary = tf.Variable(["a", "b"], name="vocabulary")
    number = tf.Variable(1.0)
    for call in both(lambda: hvd.broadcast_variables([number, vocabulary], 0)):
        error_of(TypeError, "vocabulary:0 has the dtype string.*broadcast_object", call)
    refused(TypeError, "takes a list of variables", lambda: hvd.broadcast_variables(number, 0))
    refused(TypeError, "expected a variable, got", lambda: hvd.broadcast_variables([x], 0))
    for call in both(lambda: hvd.broadcast(x, "0")):
        error_of(TypeError, "root_rank= takes an integer, got '0'", call)
    refused(TypeError, "name= takes a string", lambda: hvd.allreduce(x, name=3))
    refused(TypeError, "postscale_factor= takes a n", lambda: hvd.allreduce(x, postscale_factor=""))
    refused(TypeError, "compression= takes", lambda: hvd.allreduce(x, compression="fp16"))
    refused(ValueError, "one integer .int32. for", lambda: hvd.alltoall(x, splits=[0.5]))
    refused(TypeError, "expected a tf.GradientTape", lambda: hvd.DistributedGradientTape(None))
    assert hvd.allreduce(1 + 2j).numpy() == 1 + 2j
