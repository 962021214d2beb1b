"""A Keras model, its data, and its training on this rank's part of each batch."""

import numpy as np
import pytest

from horoplug.common.objects import allgather_object

keras = pytest.importorskip("keras")
hvd = pytest.importorskip("horoplug.keras")

ROWS, BATCH = 48, 8  # of all ranks together


def make_model(optimizer, key=1, dropout=0.0, dtype=None, **options):
    keras.utils.set_random_seed(key)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh", dtype=dtype),
            keras.layers.BatchNormalization(trainable=False),
            *([keras.layers.Dropout(dropout)] if dropout else []),
            keras.layers.Dense(1, dtype=dtype),
        ]
    )
    model.compile(optimizer, loss="mse", **options)
    return model


def make_data(key):
    random = np.random.default_rng(key)
    x = random.normal(size=(ROWS, 4)).astype("float32")
    return x, (x[:, :1] - 2 * x[:, 1:2] ** 2).astype("float32")


def mine(*arrays, batch=BATCH):
    """This rank's part of each batch."""
    rank, size = hvd.rank(), hvd.size()
    parts = [a.reshape(-1, size, batch // size, *a.shape[1:])[:, rank] for a in arrays]
    return [part.reshape(-1, *part.shape[2:]) for part in parts]


def fit(model, x, y, batch, epochs=2, **options):
    return model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **options)


def fit_mine(model, x, y, **options):
    return fit(model, *mine(x, y), BATCH // hvd.size(), **options)


def assert_same_bits(model):
    variables = [*model.weights, *model.optimizer.variables]
    accumulated = {id(v) for v in getattr(model.optimizer, "_accumulated_gradients", ())}
    bits = [np.array(v.numpy()).tobytes() for v in variables if id(v) not in accumulated]
    assert all(other == bits for other in allgather_object(bits)), "ranks differ"


def adam(**options):
    return keras.optimizers.Adam(0.01, **options)


def sgd(rate=0.1, **options):
    return keras.optimizers.SGD(rate, **options)
