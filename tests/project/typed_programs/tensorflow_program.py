"""``horoplug.tensorflow``: training, operations, elastic training."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from typing_extensions import assert_type

import horoplug.tensorflow as hvd


def train(model: Any, loss_of: Callable[[], tf.Tensor]) -> None:
    hvd.init()
    assert_type(hvd.rank(), int)
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.1 * hvd.size()),
        compression=hvd.Compression.fp16,
        backward_passes_per_step=2,
        groups=2,
    )
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, groups=2) as tape:
        loss = loss_of()
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[model.layers[0]])
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.SyncBatchNormalization(axis=1)


def operations(x: tf.Tensor) -> None:
    hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.bf16, name="x")
    hvd.allreduce(x, average=True, prescale_factor=0.5, postscale_factor=2)
    assert_type(hvd.grouped_allreduce([x, x]), list[Any])
    hvd.allgather(x, name="x")
    hvd.grouped_allgather([x])
    hvd.broadcast(x, 0)
    hvd.broadcast_([tf.Variable(tf.ones(3))], root_rank=0)
    hvd.alltoall(x, splits=[1, 2])
    hvd.reducescatter(x, op=hvd.Sum)
    hvd.grouped_reducescatter([x, x])
    hvd.size_op(name="size")
    hvd.rank_op()
    hvd.barrier(hvd.add_process_set([0, 1]))
    hvd.join()


def objects() -> None:
    assert_type(hvd.broadcast_object({"epoch": 1}, root_rank=0), Any)
    assert_type(hvd.broadcast_object_fn(root_rank=0), Callable[[Any], Any])
    assert_type(hvd.allgather_object("a"), list[Any])


@hvd.elastic.run
def train_elastic(state: hvd.elastic.TensorFlowKerasState, epochs: int) -> float:
    while state.epoch < epochs:
        state.epoch += 1
        state.commit()
    return 0.5


def elastic(model: Any) -> None:
    state = hvd.elastic.TensorFlowKerasState(model, model.optimizer, epoch=0)
    assert_type(train_elastic(state, 3), float)
    hvd.elastic.TensorFlowState(variables=model.variables, step=0).commit()
