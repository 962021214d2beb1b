import hashlib

import numpy as np
import tensorflow as tf

import horoplug.tensorflow as hvd
from tests.harness.elastic_training import Faults, train


def make():
    draw = np.random.default_rng(1)
    parameters = [tf.Variable(draw.normal(size=n).astype("float32")) for n in ((8, 16), (16, 1))]
    return parameters, [tf.Variable(tf.zeros_like(p)) for p in parameters]


def gradients(parameters, step, wrap):
    with tf.GradientTape() as tape:
        x = tf.sin(tf.reshape(tf.range(32.0), [4, 8]) * tf.cast(step + 1, tf.float32))
        y = tf.tanh(x @ parameters[0]) @ parameters[1]
        loss = tf.reduce_mean((y - tf.reduce_sum(x, 1, keepdims=True)) ** 2)
    return wrap(tape).gradient(loss, parameters)


def update(parameters, momenta, gradients):
    for p, m, g in zip(parameters, momenta, gradients, strict=True):
        m.assign(0.9 * m + g)
        p.assign_sub(0.02 * m)


hvd.init()
faults = Faults(hvd)
parameters, momenta = make()
compiled = tf.function(lambda step: gradients(parameters, step, hvd.DistributedGradientTape))


def one_step(state):
    faults.at("backward", state.step)
    reduced = compiled(tf.constant(state.step))
    faults.at("update", state.step)
    update(parameters, momenta, reduced)
    # Unnamed operations of survivors and of their replacements belong together.
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum) == hvd.size()


state = hvd.elastic.TensorFlowState([*parameters, *momenta], step=0)
train(hvd, faults, state, one_step)

reference, alone = make()
again = tf.function(lambda step: gradients(reference, step, lambda tape: tape))
for step in range(state.step):
    update(reference, alone, again(tf.constant(step)))
close = all(np.allclose(p, q, atol=1e-3) for p, q in zip(parameters, reference, strict=True))
bits = b"".join(v.numpy().tobytes() for v in [*parameters, *momenta])
faults.end(state.step, hashlib.sha256(bits).hexdigest(), close)
