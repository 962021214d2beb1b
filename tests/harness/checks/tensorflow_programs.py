"""Compiled programs of TensorFlow: tf.data, Keras, SavedModel."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")


class Reducing(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def __call__(self, x):
        return hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x)


def check_saved_model(folder):
    size = hvd.size()
    folder = f"{folder}/{hvd.rank()}"
    tf.saved_model.save(Reducing(), folder)
    total, joined = tf.saved_model.load(folder)(tf.ones([1, 2]))
    assert total.numpy().tolist() == [[size, size]]
    assert joined.shape == (size, 2)


def check_dataset():
    size, rank = hvd.size(), hvd.rank()
    numbers = tf.data.Dataset.range(10).map(lambda n: hvd.allreduce(n + rank, op=hvd.Sum))
    expected = [n * size + sum(range(size)) for n in range(10)]
    assert [int(n) for n in numbers.prefetch(3)] == expected


def check_keras(key):
    """A custom train step, traced by ``fit``."""
    rank = hvd.rank()

    class Stepping(tf.keras.Model):
        @tf.autograph.experimental.do_not_convert
        def train_step(self, data):
            x, y = data
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, variables), variables, strict=True)
            )
            return {"mine": loss}

    tf.keras.utils.set_random_seed(rank)
    inputs = tf.keras.Input((4,))
    hidden = tf.keras.layers.Dense(8, activation="tanh")(inputs)
    model = Stepping(inputs, tf.keras.layers.Dense(1)(hidden))
    model.compile(tf.keras.optimizers.SGD(0.1))
    hvd.broadcast_variables(model.variables, root_rank=0)
    random = np.random.default_rng([key, rank])
    x = random.normal(size=(64, 4)).astype("float32")

    def loss():
        return np.mean((model.predict(x, verbose=0) - x[:, :1]) ** 2)

    before = loss()
    model.fit(x, x[:, :1], epochs=5, batch_size=16, verbose=0)
    after = loss()
    bits = hvd.allgather_object([v.numpy().tobytes() for v in model.trainable_variables])
    assert all(b == bits[0] for b in bits), "ranks have different weights"
    assert after < before
