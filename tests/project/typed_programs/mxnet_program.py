"""``horoplug.mxnet``: trainer, optimizer, operations, elastic training."""

from typing import Any

import mxnet as mx
from typing_extensions import assert_type

import horoplug.mxnet as hvd


def train(net: Any, x: Any) -> None:
    hvd.init()
    assert_type(hvd.rank(), int)
    params = net.collect_params()
    options = {"learning_rate": 0.01 * hvd.size()}
    trainer = hvd.DistributedTrainer(params, "sgd", options, compression=hvd.Compression.fp16)
    hvd.broadcast_parameters(params, root_rank=0)
    trainer.step(len(x))
    hvd.DistributedOptimizer(mx.optimizer.create("sgd"), num_groups=2)


def operations(x: mx.nd.NDArray) -> None:
    hvd.allreduce(x, average=True, name="x", priority=1)
    hvd.allreduce_(x, op=hvd.Sum)
    hvd.grouped_allreduce([x, x])
    hvd.allgather(x, priority=1)
    hvd.broadcast(x, 0)
    hvd.broadcast_(x, root_rank=0)
    hvd.alltoall(x, splits=[1, 2])
    hvd.reducescatter(x, op=hvd.Sum)
    assert_type(hvd.allreduce_async(x), int)
    assert_type(hvd.broadcast_object({"epoch": 1}), Any)


@hvd.elastic.run
def train_elastic(state: hvd.elastic.MXNetState, epochs: int) -> int:
    while state.epoch < epochs:
        state.epoch += 1
        state.commit()
    return epochs


def elastic(net: Any, trainer: Any) -> None:
    state = hvd.elastic.MXNetState(params=net.collect_params(), trainer=trainer, epoch=0)
    assert_type(train_elastic(state, 3), int)
