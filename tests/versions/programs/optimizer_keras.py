"""Training with Keras on all ranks equals training on one process with the data of all: optimizer_keras.py KIND

KIND is keras (Keras 3, with the backend of KERAS_BACKEND) or tf.keras."""

import sys
from pathlib import Path

import numpy as np
from report import Report

if sys.argv[1] == "keras":
    import keras

    import horoplug.keras as hvd
else:
    from tensorflow import keras

    import horoplug.tensorflow.keras as hvd

STEPS, ROWS = 5, 12  # of one batch, of all ranks
hvd.init()
check = Report(hvd.rank())
random = np.random.default_rng(1)
inputs = random.normal(size=(STEPS, ROWS, 4)).astype(np.float32)
targets = inputs.sum(2, keepdims=True)


def share(batches: np.ndarray) -> np.ndarray:
    """This rank's rows of each batch."""
    return np.split(batches, hvd.size(), axis=1)[hvd.rank()]


def model(seed: int = 2):
    numbers = np.random.default_rng(seed)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    network = keras.Sequential([keras.Input((4,)), *layers])
    network.set_weights([numbers.normal(size=each.shape) for each in network.get_weights()])
    return network


def train(network, optimizer, x, y, callbacks=()) -> np.ndarray:
    network.compile(optimizer, loss="mse")
    rows = x.shape[1]
    flat = (part.reshape(-1, part.shape[-1]) for part in (x, y))
    history = network.fit(
        *flat, batch_size=rows, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    assert np.isfinite(history.history["loss"]).all()
    return np.concatenate([each.ravel() for each in network.get_weights()])


def check_bits(found: np.ndarray) -> None:
    rows = np.asarray(hvd.allgather(found[None]))
    assert len({row.tobytes() for row in rows}) == 1, "the ranks differ"


def compare(found: np.ndarray, alone: np.ndarray) -> None:
    check_bits(found)
    np.testing.assert_allclose(found, alone, rtol=1e-3, atol=1e-4)


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.01)


for make in (sgd, adam):
    with check(f"fit with DistributedOptimizer of {make.__name__}"):
        found = train(model(), hvd.DistributedOptimizer(make()), share(inputs), share(targets))
        compare(found, train(model(), make(), inputs, targets))
with check("backward_passes_per_step"):
    halves = [share(each).reshape(2 * STEPS, -1, each.shape[-1]) for each in (inputs, targets)]
    wrapped = hvd.DistributedOptimizer(
        sgd(), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    compare(train(model(), wrapped, *halves), train(model(), sgd(), inputs, targets))
with check("callbacks"):
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1),
    ]
    wrapped = hvd.DistributedOptimizer(sgd())
    found = train(model(hvd.rank()), wrapped, share(inputs), share(targets), callbacks)
    check_bits(found)
with check("a saved model is loaded"):
    network = model()
    train(network, hvd.DistributedOptimizer(adam()), share(inputs), share(targets))
    path = Path(f"model-{hvd.rank()}.keras")
    network.save(path)
    again = hvd.load_model(str(path))
    x, y = share(inputs)[0], share(targets)[0]
    network.fit(x, y, verbose=0, shuffle=False)
    again.fit(x, y, verbose=0, shuffle=False)
    for one, other in zip(network.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
with check("operations"):
    assert (
        np.asarray(hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum)).tolist() == [hvd.size()] * 3
    )
    assert np.asarray(hvd.broadcast(np.full(2, float(hvd.rank())), root_rank=1)).tolist() == [1, 1]
    assert len(hvd.allgather(np.zeros(hvd.rank() + 1))) == sum(range(hvd.size() + 1))
check.finish()
