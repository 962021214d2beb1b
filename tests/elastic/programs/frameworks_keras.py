import hashlib

import horovod.keras as hvd
import keras
import numpy as np

from tests.harness.elastic_training import Faults

BATCHES, EPOCHS = 6, 3
x = np.sin(np.arange(32.0)).reshape(4, 8).astype("float32")
x, y = np.tile(x, (BATCHES, 1)), np.tile(x.sum(1, keepdims=True), (BATCHES, 1))  # equal batches


def make(wrap):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(wrap(keras.optimizers.SGD(0.05, momentum=0.9)), loss="mse")
    return model


class Step(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        faults.at("backward", state.step)

    def on_train_batch_end(self, batch, logs=None):
        faults.at("update", state.step)
        state.step += 1


class Wait(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch >= 2:
            faults.wait_for_all(state)


hvd.init()
faults = Faults(hvd)
model = make(hvd.DistributedOptimizer)
state = hvd.elastic.KerasState(model, batch=0, epoch=0, step=0)
faults.watch(state)


@hvd.elastic.run
def train(state):
    callbacks = [
        Step(),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state),
        Wait(),
    ]
    options = {"batch_size": 4, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    state.model.fit(x, y, initial_epoch=state.epoch, callbacks=callbacks, **options)


train(state)
reference = make(lambda optimizer: optimizer)
reference.fit(x[:4], y[:4], batch_size=4, epochs=state.step, verbose=0)
pairs = zip(model.get_weights(), reference.get_weights(), strict=True)
close = all(np.allclose(a, b, atol=1e-3) for a, b in pairs)
variables = [*model.variables, *model.optimizer.variables]
bits = b"".join(np.asarray(keras.ops.convert_to_numpy(v)).tobytes() for v in variables)
faults.end(state.step, hashlib.sha256(bits).hexdigest(), close and state.epoch == EPOCHS)
