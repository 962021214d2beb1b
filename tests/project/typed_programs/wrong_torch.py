"""Mistakes in the use of ``horoplug.torch``."""

import numpy as np
import torch

import horoplug.torch as hvd

x = torch.ones(3)
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()))
optimizer.stepp()  # wrong
hvd.DistributedOptimizer(model)  # wrong
hvd.DistributedOptimizer(optimizer, op="average")  # wrong
hvd.DistributedOptimizer(optimizer, backward_passes_per_step=1.5)  # wrong
hvd.allreduce(np.ones(3))  # wrong
hvd.allreduce(x, op="sum")  # wrong
hvd.allreduce(x, compression="fp16")  # wrong
hvd.allreduce_async(x).backward()  # wrong
hvd.broadcast_parameters(model, root_rank=0)  # wrong
hvd.broadcast_optimizer_state(model, root_rank=0)  # wrong
print(hvd.Compression.fp8)  # wrong
hvd.elastic.ElasticSampler(3)  # wrong


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, epochs: int) -> float:
    return 0.0


train(hvd.elastic.TorchState(model, optimizer), "3")  # wrong
train(hvd.elastic.TorchState(model, optimizer))  # wrong
train(hvd.elastic.TorchState(model, optimizer), 3) + ""  # wrong
