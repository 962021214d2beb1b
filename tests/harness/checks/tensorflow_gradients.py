"""Gradients of operations, and training with DistributedGradientTape."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")


def gradient(function, x):
    """The gradient at x, which must be the same in eager mode and in a graph."""

    def compute(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(function(x))
        return tape.gradient(y, x)

    eager, graph = compute(x), tf.function(compute)(x)
    np.testing.assert_array_equal(eager, graph)
    return eager.numpy()


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, 1e-5, 1e-6)


def normal(key, *shape):
    return np.random.default_rng(key).normal(size=shape).astype("float32")


def check_allreduce_gradient(key):
    size, rank = hvd.size(), hvd.rank()
    weights = normal(key, size, 5, 3)  # the output's gradient on each rank
    x = tf.ones([5, 3])
    for op, expected in ((hvd.Average, 6 * weights.mean(0)), (hvd.Sum, 6 * weights.sum(0))):
        options = {"op": op, "prescale_factor": 2.0, "postscale_factor": 3.0}
        close(gradient(lambda x, o=options: hvd.allreduce(x, **o) * weights[rank], x), expected)
        named = options | {"name": "named"}
        close(gradient(lambda x, o=named: hvd.allreduce(x, **o) * weights[rank], x), expected)
        group = lambda x, o=options: hvd.grouped_allreduce([x, x * 0], **o)[0]  # noqa: E731
        close(gradient(lambda x, g=group: g(x) * weights[rank], x), expected)
    with pytest.raises((LookupError, NotImplementedError), match="op=Max has no gradient"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max), x)


def check_allgather_gradient(key):
    size, rank = hvd.size(), hvd.rank()
    weights = normal(key, size, size * (size + 1) // 2, 3)
    start = rank * (rank + 1) // 2
    expected = weights.mean(0)[start : start + rank + 1]
    x = tf.ones([rank + 1, 3])
    close(gradient(lambda x: hvd.allgather(x) * weights[rank], x), expected)
    close(gradient(lambda x: hvd.grouped_allgather([x, x])[1] * weights[rank], x), expected)
    numbers = tf.range(size, dtype="float32")
    assert gradient(lambda x: hvd.allgather(x) * numbers, tf.constant(1.0)) == rank


def check_alltoall_gradient(key):
    """The gradient of a row comes from the rank to which the row was sent."""
    size, rank = hvd.size(), hvd.rank()
    splits = [(2 * rank + r) % 3 for r in range(size)]  # differs from the received splits
    where = np.repeat(np.arange(size) + 1.0, splits)
    x = tf.ones([sum(splits), 2])
    close(gradient(lambda x: hvd.alltoall(x, splits)[0] * (rank + 1), x), np.stack([where] * 2, 1))
    x = tf.ones(size + 2)
    close(
        gradient(lambda x: hvd.alltoall(x, [1] * size)[0] * (rank + 1), x),
        [*range(1, size + 1), 0, 0],
    )
    x = tf.ones(size)
    close(gradient(lambda x: hvd.alltoall(x) * (rank + 1), x), range(1, size + 1))


def check_reducescatter_gradient(key):
    size, rank = hvd.size(), hvd.rank()
    owner = np.array([1.0, *range(1, size + 1)], "float32")[:, None]
    x = tf.ones([size + 1, 2])
    for op in (hvd.Average, hvd.Sum):
        options = {"op": op, "prescale_factor": 2.0, "postscale_factor": 3.0}
        expected = np.tile(owner * 6 * (size if op == hvd.Sum else 1), 2)
        close(gradient(lambda x, o=options: hvd.reducescatter(x, **o) * (rank + 1), x), expected)
        group = lambda x, o=options: hvd.grouped_reducescatter([x], **o)[0]  # noqa: E731
        close(gradient(lambda x, g=group: g(x) * (rank + 1), x), expected)


class Model:
    """Two dense layers and an embedding, whose gradient is a tf.IndexedSlices."""

    def __init__(self, key):
        self.embedding = tf.Variable(normal(key, 7, 4))
        self.first = tf.Variable(normal(key + 1, 4, 8) / 2)
        self.second = tf.Variable(normal(key + 2, 8, 1) / 3)
        self.unused = tf.Variable([1.0])
        self.variables = [self.embedding, self.first, self.second, self.unused]

    def loss(self, ids, y):
        x = tf.gather(self.embedding, ids)
        return tf.reduce_mean((tf.tanh(x @ self.first) @ self.second - y) ** 2)


def train(model, tape_of, ids, y, steps, compiled):
    """The loss of each step."""

    def step():
        with tape_of() as tape:
            loss = model.loss(ids, y)
        gradients = tape.gradient(loss, model.variables)
        assert gradients[3] is None
        for variable, g in zip(model.variables, gradients, strict=True):
            if g is not None:
                variable.assign_sub(0.1 * tf.convert_to_tensor(g))
        return loss

    # Without AutoGraph, which in TensorFlow 2.12 does not support zip(strict=True).
    step = tf.function(step, autograph=False) if compiled else step
    return [step().numpy() for _ in range(steps)]


def check_training(key, options, compiled):
    """Training on all ranks equals training in one process on all data."""
    size, rank = hvd.size(), hvd.rank()
    steps, each = 12, 8
    random = np.random.default_rng(key)
    ids = random.integers(0, 7, each * size)
    y = np.cos(ids, dtype="float32")[:, None]
    alone = Model(key)
    expected = train(alone, tf.GradientTape, ids, y, steps, compiled)

    model = Model(key + 100 * rank)
    hvd.broadcast_variables(model.variables, root_rank=0)
    mine = slice(each * rank, each * (rank + 1))
    losses = train(
        model,
        lambda: hvd.DistributedGradientTape(tf.GradientTape(), **options),
        ids[mine],
        y[mine],
        steps,
        compiled,
    )
    whole = hvd.allreduce(tf.constant(losses))
    np.testing.assert_allclose(whole, expected, 1e-3, 1e-5)
    assert expected[-1] < expected[0], "it learns"
    for mine, all_data in zip(model.variables, alone.variables, strict=True):
        np.testing.assert_allclose(mine, all_data, 1e-3, 1e-4)
    bits = hvd.allgather_object([v.numpy().tobytes() for v in model.variables])
    assert all(b == bits[0] for b in bits), "ranks have different bits"


def check_tape():
    size, rank = hvd.size(), hvd.rank()
    a, b, c = (tf.Variable([float(rank + n)]) for n in range(3))
    tape = hvd.DistributedGradientTape(tf.GradientTape(persistent=True))
    assert isinstance(tape, tf.GradientTape)
    assert type(tape).__name__ == "GradientTape"
    tape.register_local_source(b)
    with tape:
        loss = a * a + b * b + c
    mean = (size - 1) / 2
    close(tape.gradient(loss, a), [2 * mean])
    close(tape.gradient(loss, a, output_gradients=tf.constant([3.0])), [6 * mean])
    # The fourth argument is Horovod's if it is a bool, and otherwise TensorFlow's.
    unused = tf.Variable([1.0, 2.0])
    assert tape.gradient(loss, unused, None, True) is None
    assert tape.gradient(loss, unused, None, tf.UnconnectedGradients.NONE) is None
    close(tape.gradient(loss, unused, None, tf.UnconnectedGradients.ZERO), [0, 0])
    close(tape.gradient(loss, unused, unconnected_gradients="zero"), [0, 0])
    found = tape.gradient(loss, {"a": a, "rest": [b, c]})
    close(found["a"], [2 * mean])
    close(found["rest"][0], [2 * (rank + 1) / size])
    close(found["rest"][1], [1])
    sources = [a, b]
    raw = [tf.constant([rank + 1.0]), tf.constant([2.0])]
    own, shared = tape.get_local_and_global_gradients(raw, sources)
    assert own[0] is None
    close(own[1], [2 / size])
    assert shared[1] is None
    close(shared[0], [mean + 1])
    # A single tensor in place of a list.
    own, shared = tape.get_local_and_global_gradients(raw[0], a)
    assert own is None
    close(shared, [mean + 1])
    own, shared = tape.get_local_and_global_gradients(raw[1], b)
    close(own, [2 / size])
    assert shared is None

    half = hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.fp16)
    with half:
        loss = a * 3.0001
    found = half.gradient(loss, [a])[0]
    assert found.dtype == tf.float32
    assert found.numpy() == [3], "it has not travelled as float16"

    lists = hvd.DistributedGradientTape(tf.GradientTape(), groups=[[c, a]], op=hvd.Sum)
    with lists:
        loss = a + 2.0 * b + 3.0 * c
    close(lists.gradient(loss, [a, b, c]), [[size], [2 * size], [3 * size]])
    with pytest.raises(ValueError, match="op=Average only"):
        hvd.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=2.0, op=hvd.Sum)
    with pytest.raises(ValueError, match="groups"):
        hvd.DistributedGradientTape(tf.GradientTape(), groups=-1)


def check_local_layers():
    size, rank = hvd.size(), hvd.rank()
    layers = [tf.keras.layers.Dense(1, use_bias=False) for _ in range(2)]
    x = tf.ones([2, 1]) * (rank + 1)
    for layer in layers:
        layer.build([None, 1])
        layer.kernel.assign([[1.0]])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layers[1](layers[0](x)))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layers[0])
    local, shared = tape.gradient(loss, [layers[0].kernel, layers[1].kernel])
    close(local, [[2 * (rank + 1) / size]])
    close(shared, [[size + 1]])


def check_broadcasts():
    size, rank = hvd.size(), hvd.rank()
    root = size - 1

    def variables():
        layer = tf.keras.layers.BatchNormalization()
        layer.build([None, 3])
        for weight in layer.weights:
            weight.assign(tf.fill(weight.shape, float(rank)))
        return [tf.Variable(rank), tf.Variable([rank > 0, False]), *layer.weights]

    for send in (hvd.broadcast_variables, hvd.broadcast_):
        mine = variables()
        send(mine, root)
        assert mine[0].numpy() == root
        assert mine[1].numpy().tolist() == [root > 0, False]
        for weight in mine[2:]:
            assert (weight.numpy() == root).all()
    mine = variables()
    tf.function(lambda: hvd.broadcast_variables(mine, root) and None)()
    assert mine[0].numpy() == root
    assert (mine[-1].numpy() == root).all()
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    thing = {"rank": rank, "array": np.arange(rank + 1)}
    assert hvd.broadcast_object(thing, root)["rank"] == root
    assert hvd.broadcast_object_fn(root_rank=0)(thing)["rank"] == 0
    assert [t["rank"] for t in hvd.allgather_object(thing)] == list(range(size))


def check_old_graphs():
    """Broadcasts in graphs and sessions of TensorFlow 1."""
    rank, size = hvd.rank(), hvd.size()
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=tf.constant([float(rank), 5.0]))
        hook = hvd.BroadcastGlobalVariablesHook(size - 1)
        total = hvd.allreduce(variable, op=hvd.Sum)
        (slope,) = v1.gradients(total, [variable])
        with v1.train.MonitoredSession(hooks=[hook]) as session:
            assert session.run(variable).tolist() == [size - 1, 5]
            assert session.run(total).tolist() == [size * (size - 1), 5 * size]
            assert session.run(slope).tolist() == [size, size]
    with tf.Graph().as_default():  # the same hook in another graph
        variable = v1.get_variable("v", initializer=tf.constant([float(rank)]))
        with v1.train.MonitoredSession(hooks=[hook]) as session:
            assert session.run(variable).tolist() == [size - 1]
