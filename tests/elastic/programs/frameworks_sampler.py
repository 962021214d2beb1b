import hashlib

import torch

import horoplug.torch as hvd
from tests.harness.elastic_training import Faults

hvd.init()
faults = Faults(hvd)
data = torch.arange(1000)
sampler = hvd.elastic.ElasticSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
# What the committed training has seen: (epoch, samples of all ranks in the order of the sampler) of each step.
state = hvd.elastic.TorchState(sampler=sampler, epoch=0, step=0, seen=[])
faults.watch(state)


@hvd.elastic.run
def run(state):
    taken = 0
    while hvd.broadcast_object(state.epoch < 2 or not faults.are_over, 0):
        for batch, samples in enumerate(loader):
            faults.at("backward", state.step)
            of_all = hvd.allgather_object(samples.tolist())
            faults.at("update", state.step)
            rows = zip(*of_all, strict=True)
            state.seen.append((state.epoch, [sample for row in rows for sample in row]))
            state.sampler.record_batch(batch, len(samples))
            state.step += 1
            state.commit()
            taken += 1
            if taken == 3:
                faults.wait_for_all(state)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)


run(state)
bits = hashlib.sha256(repr(state.seen).encode()).hexdigest()
faults.end(state.step, bits, True, seen=state.seen)
