"""Trains with Fabric in an elastic job, which ends when it is told to: python lightning_elastic.py FOLDER STEPS.

``STEPS``: how many are made after the checkpoint, if there is one.

The batches depend on the step alone, so that the parameters do not depend on when the job was interrupted. Before it
ends, the job writes a checkpoint, with which the next one goes on. With WAIT in the environment, a job without a
checkpoint trains until it is told to end."""

import os
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric

import horoplug.lightning
import horoplug.torch as hvd

# Lightning imports mpi4py to look for an MPI, and does not expect the exception of mpi4py 4 where none is installed.
sys.modules["mpi4py"] = None

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
CHECKPOINT = FOLDER / "checkpoint.ckpt"


def main():
    fabric = Fabric(accelerator="cpu", strategy="horovod")
    fabric.launch()
    torch.manual_seed(7)
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    plain = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(network, plain)
    begin = 0
    if CHECKPOINT.exists():
        rest = fabric.load(CHECKPOINT, {"model": model, "optimizer": optimizer})
        begin = rest["step"]
    waits = "WAIT" in os.environ and not begin
    state = hvd.elastic.TorchState(network, optimizer.optimizer, step=begin)

    def write_checkpoint():
        steps = hvd.allgather(torch.tensor([state.step]), name="steps")
        assert (steps == state.step).all()
        content = {"model": model, "optimizer": optimizer, "step": state.step}
        fabric.save(CHECKPOINT, content)

    state.register_notice_callbacks([write_checkpoint])

    @hvd.elastic.run
    def train(state):
        while state.step < begin + STEPS or waits:
            generator = torch.Generator().manual_seed(state.step)
            inputs = torch.randn(4, 8, generator=generator)
            optimizer.zero_grad()
            fabric.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
            optimizer.step()
            state.step += 1
            state.commit()
            if state.step == 5:
                print("step 5 is over", flush=True)

    train(state)
    print(f"from {begin} to {state.step} on {hvd.size()} ranks", flush=True)
    if hvd.rank() == 0:
        parameters = {name: p.detach() for name, p in network.named_parameters()}
        torch.save({"parameters": parameters, "step": state.step}, FOLDER / "result.pt")


assert horoplug.lightning  # registers the strategy
main()
