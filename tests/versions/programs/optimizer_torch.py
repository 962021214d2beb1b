"""Training with PyTorch on all ranks equals training on one process with the data of all."""

import numpy as np
import torch
from report import Report

import horoplug.torch as hvd

STEPS, ROWS = 5, 12
hvd.init()
check = Report(hvd.rank())


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def rows(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step))


def train(network, optimizer, share, passes: int = 1) -> np.ndarray:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in share(rows(step)).chunk(passes):
            (network(part).square().mean() / passes).backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in network.parameters()]).numpy()


def mine(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(hvd.size())[hvd.rank()]


def compare(make, passes: int = 1, tolerance: float = 1e-6, **options) -> None:
    network = model()
    if hvd.rank() != 0:
        for each in network.parameters():
            torch.nn.init.zeros_(each)
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        make(network.parameters()),
        named_parameters=network.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    found = train(network, optimizer, mine, passes)
    assert len(set(hvd.allgather_object(found.tobytes()))) == 1, "the ranks differ"
    plain = model()
    alone = train(plain, make(plain.parameters()), lambda batch: batch)
    np.testing.assert_allclose(found, alone, rtol=tolerance * 10, atol=tolerance)


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}
for name, make in OPTIMIZERS.items():
    with check(f"DistributedOptimizer of {name}"):
        compare(make, tolerance=1e-5)
with check("backward_passes_per_step"):
    compare(OPTIMIZERS["SGD"], passes=2)
with check("groups of gradients"):
    compare(OPTIMIZERS["SGD"], num_groups=2)
with check("compression"):
    compare(OPTIMIZERS["SGD"], tolerance=1e-2, compression=hvd.Compression.fp16)
with check("SyncBatchNorm"):
    layer, plain = hvd.SyncBatchNorm(4), torch.nn.BatchNorm1d(4)
    batch = rows(0).requires_grad_()
    expected = plain(batch)
    expected.square().sum().backward()
    part = mine(rows(0)).requires_grad_()
    found = layer(part)
    found.square().sum().backward()
    torch.testing.assert_close(found, mine(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(part.grad, mine(batch.grad), rtol=1e-3, atol=1e-4)
with check("gradient of allreduce"):
    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x * (hvd.rank() + 1), op=hvd.Sum) * 2).sum().backward()
    assert x.grad.tolist() == [2.0 * hvd.size() * (hvd.rank() + 1)] * 3, x.grad
check.finish()
