"""Training with MXNet's Gluon on all ranks equals training on one process with the data of all."""

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from report import Report

import horoplug.mxnet as hvd

hvd.init()
check = Report(hvd.rank())
inputs = np.random.default_rng(1).normal(size=(5, 12, 4)).astype(np.float32)


def train(batches, trainer, *, broadcast: bool) -> np.ndarray:
    network = gluon.nn.Dense(2, in_units=4)
    network.initialize(mx.init.Constant(0.0 if broadcast and hvd.rank() else 0.5))
    if broadcast:
        hvd.broadcast_parameters(network.collect_params(), root_rank=0)
    steps = trainer(network.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    for batch in batches:
        with autograd.record():
            loss = (network(mx.nd.array(batch)) ** 2).sum(axis=1)
        loss.backward()
        steps.step(len(batch))
    return np.concatenate(
        [each.data().asnumpy().ravel() for each in network.collect_params().values()]
    )


with check("DistributedTrainer"):
    mine = np.split(inputs, hvd.size(), axis=1)[hvd.rank()]
    found = train(mine, hvd.DistributedTrainer, broadcast=True)
    assert len(set(hvd.allgather_object(found.tobytes()))) == 1, "the ranks differ"
    alone = train(inputs, gluon.Trainer, broadcast=False)
    np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-5)
check.finish()
