"""Programs in which each rank starts the operations of a graph in a different order, as it may with Horovod."""

import random

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")


def reordered(things):
    """The things in the opposite order on odd ranks."""
    return list(things)[:: 1 - 2 * (hvd.rank() % 2)]


def check_any_order(key):
    """Each rank starts the operations in a different order. Some operations need the results of others."""
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

    for turn in range(12):  # repeated steps become a plan
        outputs = step(tf.fill([5 if turn < 10 else 2000], float(turn)))
        for i, output in enumerate(outputs):
            expected = size * (turn + i) + (i % size if i % 3 == 0 else 0)
            assert (output.numpy() == expected).all(), (turn, i)


def check_every_operation():
    """More operations than threads, of every kind, in opposite orders."""
    size, rank = hvd.size(), hvd.rank()
    everywhere = tf.ones([size], tf.int32)
    calls = {
        "allreduce": lambda x, name: hvd.allreduce(x, op=hvd.Sum, name=name),
        "allgather": lambda x, name: hvd.allgather(x[:1], name=name),
        "broadcast": lambda x, name: hvd.broadcast(x, size - 1, name=name),
        "alltoall": lambda x, name: hvd.alltoall(x, everywhere, name=name)[0],
        "reducescatter": lambda x, name: hvd.reducescatter(x, op=hvd.Sum, name=name),
        "group": lambda x, name: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, name=name)[1],
    }
    labels = [(kind, number) for number in range(5) for kind in calls]

    @tf.function(autograph=False)
    def step(x):
        found = {(k, n): calls[k](x + n, f"{k}{n}") for k, n in reordered(labels)}
        return [found[label] for label in labels]

    ranks, total = np.arange(size), size * (size - 1) / 2
    for turn in range(4):
        outputs = step(tf.fill([size], float(rank + turn)))
        for (kind, number), output in zip(labels, outputs, strict=True):
            added = turn + number
            expected = {
                "allreduce": [total + size * added] * size,
                "allgather": ranks + added,
                "broadcast": [size - 1 + added] * size,
                "alltoall": ranks + added,
                "reducescatter": [total + size * added],
                "group": [2 * (total + size * added)] * size,
            }
            assert output.numpy().tolist() == list(expected[kind]), (kind, number, turn)


def check_nested_functions():
    """A function that is called twice by another one, with operations in branches, and the gradient."""
    size = hvd.size()
    names = [f"chain{i}" for i in range(6)]

    def chain(x, name):
        first = hvd.allreduce(x, op=hvd.Sum, name=f"{name}.first")
        total = tf.reduce_sum(hvd.allgather(first + 1, name=f"{name}.rows"))
        last = hvd.allreduce(total, op=hvd.Average, name=f"{name}.last")
        return tf.cond(last > 0, lambda: tf.identity(last), lambda: -last)

    @tf.function(autograph=False)
    def inner(x):
        found = {name: chain(x, name) for name in reordered(names)}
        return tf.add_n([found[name] for name in names])

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = inner(x) + inner(x + 1)
        return total, tape.gradient(total, x)

    for turn in range(4):
        total, gradient = step(tf.constant([1.0, float(turn)]))
        assert total.numpy() == len(names) * size * (size * (2 * turn + 4) + 4)
        # The gradient of an allreduce with Sum adds the gradients of the ranks; that of an allgather averages them.
        assert gradient.numpy().tolist() == [2 * len(names) * size] * 2


class Towers:
    """Towers that do not depend on each other, with an allreduce in each. Ranks compute them in different orders."""

    def __init__(self, label, count):
        self.names = [f"{label}.{i}" for i in range(count)]
        self.weights = {name: tf.Variable([float(i)]) for i, name in enumerate(self.names)}
        self.variables = [self.weights[name] for name in self.names]

    def loss(self, x):
        parts = {
            name: hvd.allreduce(self.weights[name] * x, op=hvd.Average, name=name)
            for name in reordered(self.names)
        }
        return tf.add_n([tf.reduce_sum((parts[name] - 1.0) ** 2) for name in self.names])


def check_gradient_tape():
    """A distributed tape, whose reductions run beside those of the towers."""
    towers = Towers("tape", 8)

    @tf.function(autograph=False)
    def step(x):
        with hvd.DistributedGradientTape(tf.GradientTape(), num_groups=4) as tape:
            loss = towers.loss(x)
        gradients = tape.gradient(loss, towers.variables)
        for variable, gradient in zip(towers.variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    losses = [step(tf.ones([1])).numpy() for _ in range(30)]
    assert losses[-1] < 1e-3 < losses[0]


def check_optimizers():
    """Two models with an optimizer each, which the ranks train in different orders."""
    models = {label: Towers(label, 4) for label in ("generator", "discriminator")}
    optimizers = {
        label: hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), name=label)
        for label in models
    }
    for label, model in models.items():  # the variables of optimizers are made outside of functions
        optimizers[label].build(model.variables)

    @tf.function(autograph=False)
    def step(x):
        losses = {}
        for label in reordered(models):
            with tf.GradientTape() as tape:
                losses[label] = models[label].loss(x)
            variables = models[label].variables
            gradients = tape.gradient(losses[label], variables)
            optimizers[label].apply_gradients(zip(gradients, variables, strict=True))
        return losses

    first, *_, last = [step(tf.ones([1])) for _ in range(30)]
    assert all(last[label] < 1e-3 < first[label] for label in models)


def check_fit():
    """A Keras model whose layers run an operation each, trained by ``fit``."""
    names = [f"layer{i}" for i in range(6)]

    class Averaged(tf.keras.layers.Layer):
        def call(self, x):
            return hvd.allreduce(x, op=hvd.Average, name=self.name)

    tf.keras.utils.set_random_seed(1)
    inputs = tf.keras.Input((3,))
    layers = {name: tf.keras.layers.Dense(2, name=f"dense.{name}")(inputs) for name in names}
    found = {name: Averaged(name=name)(layers[name]) for name in reordered(names)}
    model = tf.keras.Model(inputs, tf.keras.layers.Add()([found[name] for name in names]))
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05)), "mse")
    x = np.random.default_rng(1).normal(size=(64, 3)).astype("float32")
    fitted = model.fit(x, x[:, :2], epochs=6, batch_size=16, shuffle=False, verbose=0)
    losses = fitted.history["loss"]
    assert losses[-1] < losses[0] / 2


def check_session():
    """A session of TensorFlow 1, which has threads of its own."""
    size = hvd.size()
    v1 = tf.compat.v1
    config = v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
    names = [f"session{i}" for i in range(12)]
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        x = v1.placeholder(tf.float32, [2])
        found = {n: hvd.allreduce(x + i, op=hvd.Sum, name=n) for i, n in enumerate(names)}
        for turn in range(3):
            results = session.run([found[n] for n in reordered(names)], {x: [1.0, turn]})
            for i, result in zip(reordered(range(len(names))), results, strict=True):
                assert result.tolist() == [size * (1 + i), size * (turn + i)]


def check_failed_operations():
    """Ranks disagree about some of the operations; the function fails, and works afterwards."""
    size, rank = hvd.size(), hvd.rank()
    names = [f"failing{i}" for i in range(12)]

    @tf.function(autograph=False)
    def step(x, other):
        found = {
            name: hvd.allreduce(other if name.endswith("5") else x, op=hvd.Sum, name=name)
            for name in reordered(names)
        }
        return [found[name] for name in names]

    for _ in range(3):
        with pytest.raises(tf.errors.FailedPreconditionError, match="failing5"):
            step(tf.ones([2]), tf.ones([2 + rank]))
        hvd.barrier()
        for output in step(tf.ones([2]), tf.ones([2])):
            assert output.numpy().tolist() == [size] * 2


CHECKS = [
    check_every_operation,
    check_nested_functions,
    check_gradient_tape,
    check_optimizers,
    check_fit,
    check_session,
    check_failed_operations,
]
