"""Measures how much faster the network of train.py trains on all processes than on one.

    horovodrun -np 2 python examples/pytorch/speedup.py

Blocks of steps on one process, while the others sleep, alternate with blocks of steps on all processes, so that other
work on the machine slows down both. The speed-up is the median over pairs of neighbouring blocks. Every process
computes with one thread."""

import argparse
import json
import os
import statistics
import time

import torch
from torch.nn import functional as F
from train import Network, total

import horoplug.torch as hvd

BATCH = 64
TICKS = os.sysconf("SC_CLK_TCK")


class Trainer:
    """Trains on random images, by itself or together with the other processes."""

    def __init__(self, together: bool) -> None:
        torch.manual_seed(1)
        self.model = Network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        if together:
            named = self.model.named_parameters()
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, named)
        self.images = torch.rand(BATCH, 1, 28, 28)
        self.labels = torch.randint(10, (BATCH,))

    def block(self, steps: int) -> float:
        """Images per second of this process."""
        started = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.images), self.labels).backward()
            self.optimizer.step()
        return steps * BATCH / (time.perf_counter() - started)


def busy_seconds() -> float:
    """Processor time of all processes of this machine, and what other virtual machines took of it (steal)."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _wait, irq, softirq, steal = map(
            int, file.readline().split()[1:9]
        )
    return (user + nice + system + irq + softirq + steal) / TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=8, help="blocks of each kind")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a block")
    parser.add_argument("--json", action="store_true", help="print the results as a line of JSON")
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    one, several = Trainer(False), Trainer(True)
    several.block(10)  # warm up
    one.block(10)
    (speed,) = hvd.broadcast(torch.tensor([several.block(10)], dtype=torch.float64), 0).tolist()
    steps = max(int(args.seconds * speed / BATCH), 3)

    alone, together = [], []
    began, others = time.monotonic(), busy_seconds() - total(time.process_time())[0]
    for _ in range(args.blocks):
        hvd.barrier()
        if hvd.rank() == 0:
            alone.append(one.block(steps))
        hvd.barrier()  # where the other processes sleep meanwhile
        together += total(several.block(steps))
    others = busy_seconds() - total(time.process_time())[0] - others
    seconds = (time.monotonic() - began) * (os.cpu_count() or 1)

    if hvd.rank() == 0:
        pairs = zip(together, alone, strict=True)
        result = {
            "processes": hvd.size(),
            "one": statistics.median(alone),
            "several": statistics.median(together),
            "speed_up": statistics.median(both / single for both, single in pairs),
            "others": max(others / seconds, 0.0),
        }
        text = "{several:,.0f} images/s on {processes} processes, {one:,.0f} on one: speed-up {speed_up:.2f}"
        print(json.dumps(result) if args.json else text.format(**result), flush=True)


if __name__ == "__main__":
    main()
