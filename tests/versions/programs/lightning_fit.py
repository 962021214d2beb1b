"""Training with Lightning's Trainer and Fabric on the strategy horovod equals training on one process."""

import copy
import os
import sys

import lightning
import numpy as np
import torch
from lightning.fabric import Fabric
from report import Report
from torch.utils.data import DataLoader, TensorDataset

import horoplug.lightning
import horoplug.torch as hvd

# Lightning imports mpi4py to look for an MPI, and does not expect the exception of mpi4py 4 where none is installed.
sys.modules["mpi4py"] = None
hvd.init()
check = Report(hvd.rank())
inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def train(model: torch.nn.Module, epochs: int = 4) -> np.ndarray:
    """By hand, with the rows of all ranks in one batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(epochs):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return bits(model)


def bits(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([each.detach().flatten() for each in model.parameters()]).numpy()


def compare(found: np.ndarray, alone: np.ndarray) -> None:
    assert len(set(hvd.allgather_object(found.tobytes()))) == 1, "the ranks differ"
    np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-5)


alone = train(copy.deepcopy(Model().net))
with check("Trainer"):
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=horoplug.lightning.HorovodStrategy(scale_lr=False),
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.getcwd(),
    )
    trainer.fit(model, DataLoader(TensorDataset(inputs), batch_size=len(inputs) // hvd.size()))
    compare(bits(model.net), alone)
with check("Fabric"):
    fabric = Fabric(accelerator="cpu", strategy="horovod")
    fabric.launch()
    network = Model().net
    plain = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    wrapped, optimizer = fabric.setup(network, plain)
    for _ in range(4):
        optimizer.zero_grad()
        fabric.backward(wrapped(inputs.chunk(hvd.size())[hvd.rank()]).square().mean())
        optimizer.step()
    compare(bits(network), alone)
check.finish()
