"""Training with TensorFlow on all ranks equals training on one process with the data of all."""

import numpy as np
import tensorflow as tf
from report import Report

import horoplug.tensorflow as hvd

STEPS, ROWS = 5, 12
hvd.init()
check = Report(hvd.rank())
inputs = np.random.default_rng(1).normal(size=(STEPS, ROWS, 4)).astype(np.float32)
mine = np.split(inputs, hvd.size(), axis=1)[hvd.rank()]


def variables() -> list[tf.Variable]:
    random = np.random.default_rng(2)
    return [tf.Variable(random.normal(size=size).astype(np.float32)) for size in ((4, 8), (8, 2))]


def loss(weights: list[tf.Variable], batch: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(tf.tanh(batch @ weights[0]) @ weights[1]))


def bits(weights: list[tf.Variable]) -> np.ndarray:
    return np.concatenate([each.numpy().ravel() for each in weights])


def compare(found: np.ndarray, alone: np.ndarray, tolerance: float = 1e-5) -> None:
    assert len(set(hvd.allgather_object(found.tobytes()))) == 1, "the ranks differ"
    np.testing.assert_allclose(found, alone, rtol=tolerance, atol=tolerance)


def by_tape(batches: np.ndarray, wrap, make, apply, decorate) -> np.ndarray:
    weights, optimizer = variables(), make()
    if hasattr(optimizer, "build"):
        optimizer.build(weights)

    def step(batch: tf.Tensor) -> None:
        with wrap(tf.GradientTape()) as tape:
            value = loss(weights, batch)
        apply(optimizer, tape.gradient(value, weights), weights)

    step = decorate(step)
    for batch in batches:
        step(tf.constant(batch))
    return bits(weights)


def apply_gradients(optimizer, gradients, weights) -> None:
    optimizer.apply_gradients(zip(gradients, weights))  # noqa: B905  (a part of tf.function)


def sgd():
    return tf.keras.optimizers.SGD(0.1, momentum=0.9)


def momentum():
    return tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)


def plain(tape):
    return tape


for name, decorate in {"eagerly": plain, "in a function": tf.function}.items():
    with check(f"DistributedGradientTape {name}"):
        found = by_tape(mine, hvd.DistributedGradientTape, sgd, apply_gradients, decorate)
        compare(found, by_tape(inputs, plain, sgd, apply_gradients, decorate))
    with check(f"DistributedOptimizer of a Keras optimizer {name}"):
        found = by_tape(
            mine, plain, lambda: hvd.DistributedOptimizer(sgd()), apply_gradients, decorate
        )
        compare(found, by_tape(inputs, plain, sgd, apply_gradients, decorate))
with check("DistributedOptimizer of an optimizer of TensorFlow 1"):

    def train(optimizer, batches: np.ndarray) -> np.ndarray:
        weights = variables()
        for batch in batches:
            optimizer.minimize(
                lambda batch=batch: loss(weights, tf.constant(batch)), var_list=weights
            )
        return bits(weights)

    compare(train(hvd.DistributedOptimizer(momentum()), mine), train(momentum(), inputs))
with check("broadcast_variables"):
    weights = [tf.Variable(tf.fill([3], float(hvd.rank())))]
    hvd.broadcast_variables(weights, root_rank=hvd.size() - 1)
    assert weights[0].numpy().tolist() == [hvd.size() - 1.0] * 3
with check("sparse gradients"):
    table = tf.Variable(tf.ones([4, 2]))
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        value = tf.reduce_sum(tf.gather(table, [hvd.rank()])) * hvd.size()
    gradient = tf.convert_to_tensor(tape.gradient(value, table)).numpy()
    assert gradient.tolist() == [[1.0, 1.0]] * hvd.size() + [[0.0, 0.0]] * (4 - hvd.size())
with check("gradient of allreduce"):
    x = tf.ones(3)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(hvd.allreduce(x * (hvd.rank() + 1.0), op=hvd.Sum) * 2)
    assert tape.gradient(value, x).numpy().tolist() == [2.0 * hvd.size() * (hvd.rank() + 1)] * 3
with check("SyncBatchNormalization"):
    whole = inputs[0]
    layer = hvd.SyncBatchNormalization(axis=-1)
    found = layer(tf.constant(mine[0]), training=True).numpy()
    expected = (whole - whole.mean(0)) / np.sqrt(whole.var(0) + 1e-3)
    np.testing.assert_allclose(
        found, np.split(expected, hvd.size())[hvd.rank()], rtol=1e-3, atol=1e-4
    )
check.finish()
