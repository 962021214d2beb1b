import hashlib

import torch

import horoplug.torch as hvd
from tests.harness.elastic_training import Faults, train


class Momentum(torch.optim.SGD):
    def step(self, *args):
        faults.at("update", state.step)
        super().step(*args)


def make(kind):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, kind(model.parameters(), lr=0.05, momentum=0.9)


def loss(model, step):
    x = torch.sin(torch.arange(32.0).view(4, 8) * (step + 1))  # the same on all ranks
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def one_step(state):
    optimizer.zero_grad()
    value = loss(model, state.step)
    faults.at("backward", state.step)
    value.backward()
    optimizer.step()
    # Unnamed operations of survivors and of their replacements belong together.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


hvd.init()
faults = Faults(hvd)
model, optimizer = make(Momentum)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)
train(hvd, faults, state, one_step)

reference, alone = make(torch.optim.SGD)
for step in range(state.step):
    alone.zero_grad()
    loss(reference, step).backward()
    alone.step()
found, expected = (
    torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, reference)
)
momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
bits = b"".join(t.detach().numpy().tobytes() for t in [*model.parameters(), *momenta])
faults.end(state.step, hashlib.sha256(bits).hexdigest(), torch.allclose(found, expected, atol=1e-4))
