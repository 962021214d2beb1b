"""``horoplug.keras`` and ``horoplug.tensorflow.keras``: the optimizer, callbacks, operations, elastic training."""

from typing import Any

import keras
from typing_extensions import assert_type

import horoplug.keras as hvd
import horoplug.tensorflow.keras as hvd_of_tensorflow


def train(model: keras.Model, x: Any, y: Any) -> None:
    hvd.init()
    assert_type(hvd.rank(), int)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1 * hvd.size()),
        compression=hvd.Compression.fp16,
        groups=2,
        process_set=hvd.global_process_set,
    )
    assert_type(optimizer, keras.optimizers.SGD)
    model.compile(optimizer, loss="mse")
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=3),
        hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.1**epoch, start_epoch=3),
    ]
    model.fit(x, y, callbacks=callbacks)
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = "best.keras"
    hvd.broadcast_global_variables(0, model)
    hvd.load_model("model.keras", compression=hvd.Compression.bf16)
    hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=model.layers[:1])
    hvd_of_tensorflow.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2)


def operations(x: Any) -> None:
    hvd.allreduce(x, op=hvd.Sum, name="x", compression=hvd.Compression.fp16)
    hvd.allgather(x)
    hvd.broadcast(x, root_rank=0)
    hvd.reducescatter(x, op=hvd.Sum)


@hvd.elastic.run
def train_elastic(state: hvd.elastic.KerasState, epochs: int) -> None:
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
    ]
    state.model.fit(initial_epoch=state.epoch, epochs=epochs, callbacks=callbacks)


def elastic(model: keras.Model) -> None:
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    train_elastic(state, epochs=3)
    train_elastic(hvd_of_tensorflow.elastic.KerasState(model, epoch=0), epochs=3)
