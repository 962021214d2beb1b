"""Trains a Keras model in an elastic job without returning to commits. It fails as tests/harness/elastic_training.py
describes."""

import hashlib
import os

import keras
import numpy as np

LOOP = os.environ["TEST_LOOP"]  # "fit" with any backend, or "function" for a function of TensorFlow
STEPS = 20
BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
if LOOP == "function":
    import horoplug.tensorflow as hvd
else:
    import horoplug.keras as hvd  # type: ignore[no-redef]
from horoplug.common.objects import broadcast_object
from tests.harness.elastic_training import Faults


def batch(step):
    x = np.sin(np.arange(32.0) * (step + 1)).reshape(4, 8).astype("float32")
    return x, x.sum(1, keepdims=True)  # the same on all ranks


def told(moment, *tensors):
    # Be at a moment of the current step, when the tensors are computed.
    if BACKEND == "tensorflow" and not tf.executing_eagerly():
        with tf.control_dependencies(tensors):
            return [tf.py_function(lambda: faults.at(moment, state.step), [], [])]
    faults.at(moment, state.step)
    return []


def while_reducing(x):
    # In the backward pass, between the gradients of the last layer and those of the first one.
    if BACKEND != "tensorflow":
        return x

    @tf.custom_gradient
    def same(x):
        def gradient(dy):
            with tf.control_dependencies(told("reduction", dy)):
                return tf.identity(dy)

        return tf.identity(x), gradient

    return same(x)


class Adam(keras.optimizers.Adam):
    # Fails between the reduction of the gradients and the update.
    def apply(self, grads, trainable_variables=None):
        given = [g for g in grads if g is not None]
        if BACKEND != "tensorflow" or tf.executing_eagerly():
            told("update")
            return super().apply(grads, trainable_variables)
        with tf.control_dependencies(told("update", *given)):
            return super().apply(grads, trainable_variables)


def make(optimizer, middle):
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Lambda(middle),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(optimizer, loss="mse")
    return model


hvd.init()
faults = Faults(hvd)
if LOOP == "fit":
    model = make(hvd.DistributedOptimizer(Adam(0.01), groups=4), while_reducing)
    state = hvd.elastic.KerasState(model, rollback=False, step=0)  # type: ignore[attr-defined]
else:
    model = make(Adam(0.01), while_reducing)
    state = hvd.elastic.TensorFlowKerasState(model, rollback=False, step=0)
faults.watch(state)


def next_step():
    kept = {id(v) for v in model.trainable_variables}
    state.step += 1
    state.commit()
    assert not kept & {id(v) for v, _ in state._saved_variables}  # nothing was copied
    if state.step % 3 == 0:
        faults.wait_for_all(state)


def go_on():
    return state.step < STEPS or not faults.are_over


class Steps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        faults.at("backward", state.step)

    def on_train_batch_end(self, batch, logs=None):
        next_step()


def one_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    gradients = hvd.DistributedGradientTape(tape, groups=4).gradient(
        loss, model.trainable_variables
    )
    loss = hvd.allreduce(loss, name="loss")
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


if LOOP == "function":
    one_step = tf.function(one_step)


@hvd.elastic.run
def train(state):
    while broadcast_object(go_on(), 0):
        x, y = batch(state.step)
        if LOOP == "fit":
            model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=[Steps()])
        else:
            faults.at("backward", state.step)
            one_step(tf.constant(x), tf.constant(y))
            next_step()


train(state)
reference = make(keras.optimizers.Adam(0.01), lambda x: x)
for step in range(state.step):
    reference.train_on_batch(*batch(step))
pairs = zip(model.get_weights(), reference.get_weights(), strict=True)
close = all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)
variables = [*model.variables, *model.optimizer.variables]
steps = int(model.optimizer.iterations.numpy())
bits = b"".join(np.asarray(v.numpy()).tobytes() for v in variables)
faults.end(state.step, hashlib.sha256(bits).hexdigest(), close and steps == state.step)
