"""A process of the jobs that ``elastic.py`` starts. It trains a model of two layers, and tells the benchmark over a
connection when its steps end.

The only argument is a :class:`Task` as JSON."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch  # elastic.py imports this module for its types, and computes nothing

AROUND = 30  # further steps after the replacement has been taken in
BYTES_PER_PARAMETER = 12  # a float32, and two more of Adam


class Timeouts(NamedTuple):
    """torchft's, in milliseconds; those of the lighthouse are named as there."""

    join_timeout_ms: int
    quorum_tick_ms: int
    heartbeat_timeout_ms: int
    heartbeat_interval: int
    operation: int


class Task(NamedTuple):
    """``way``: plain, rollback=True, rollback=False or torchft. ``process``: its number, from 0, for torchft.

    ``victim``: the process that dies in the step after ``at`` steps; None: the benchmark says how many steps to make.
    ``ranks``: the number before the failure. ``lighthouse``: its address."""

    address: str
    way: str
    state_bytes: int
    ranks: int
    victim: int | None = None
    at: int = 0
    process: int = 0
    lighthouse: str = ""
    timeouts: tuple[int, ...] = ()


class End(NamedTuple):
    """The end of a step: how many were committed by then, when it was, and the number of processes in it."""

    step: int
    time: float
    ranks: int


class Stopwatch:
    """The ends of the steps of one process."""

    def __init__(self, task: Task, process: int, gate: Connection) -> None:
        self.task, self.process, self.gate = task, process, gate
        self.ends: list[End] = []
        self.is_done = False
        self._was_smaller = process >= task.ranks  # a replacement
        self._stop = math.inf

    def in_forward(self, step: int) -> None:
        """Called in each forward pass; ``step``: committed steps."""
        if self.process == self.task.victim and step == self.task.at:
            time.sleep(0.05)  # so that the others wait for this process
            self.gate.send(("killed", time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, step: int, size: int) -> None:
        """Called at the end of each step, whether it was committed or not."""
        now = time.monotonic()
        self.ends.append(End(step, now, size))
        if step <= self.task.at:
            return
        if size < self.task.ranks:
            if not self._was_smaller:
                self._was_smaller = True
                self.gate.send(("recovered", now))
        elif self._was_smaller:
            self._stop = min(self._stop, step + AROUND)
        self.is_done = step >= self._stop

    def report(self) -> None:
        """Tell the benchmark all ends, and wait until the other processes have done so."""
        if self.ends:
            self.gate.send(("ends", [tuple(end) for end in self.ends]))
            self.gate.recv()


def make(state_bytes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A model and its optimizer, which together have about this many bytes, and a batch; the same in every process."""
    import torch

    torch.manual_seed(1)
    width = max(1, round(math.sqrt(state_bytes / BYTES_PER_PARAMETER / 2)))
    layers = torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width)
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), lr=1e-4), torch.randn(4, width)


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (model(batch) - batch).square().mean()
    return found


def blocks(gate: Connection, step: Callable[[], None]) -> None:
    """Make as many steps as the benchmark says, again and again, and send the seconds of all together."""
    while steps := gate.recv():
        start = time.perf_counter()
        for _ in range(steps):
            step()
        gate.send(("steps", time.perf_counter() - start))


def horoplug(task: Task, gate: Connection) -> None:
    import horoplug.torch as hvd

    model, plain, batch = make(task.state_bytes)
    hvd.init()
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    watch = Stopwatch(task, int(os.environ.get("HOROPLUG_ELASTIC_PROCESS", 0)), gate)

    def step(made: int = -1) -> None:
        optimizer.zero_grad()
        error = loss(model, batch)
        watch.in_forward(made)
        error.backward()
        optimizer.step()

    if task.way == "plain":
        blocks(gate, step)
        return
    rollback = task.way == "rollback=True"
    state: Any = hvd.elastic.TorchState(model, optimizer, rollback=rollback, step=0)

    def committed_step() -> None:
        step(state.step)
        state.step += 1
        state.commit()

    @hvd.elastic.run
    def train(state: Any) -> None:
        if task.victim is None:
            blocks(gate, committed_step)
            return
        while not watch.is_done:
            committed_step()
            watch.end(state.step, hvd.size())

    train(state)
    watch.report()


def torchft(task: Task, gate: Connection) -> None:
    from datetime import timedelta

    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model, plain, batch = make(task.state_bytes)
    timeouts = Timeouts(*task.timeouts)
    limit = timedelta(milliseconds=timeouts.operation)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=2,
        timeout=limit,
        quorum_timeout=timedelta(seconds=60),
        heartbeat_interval=timedelta(milliseconds=timeouts.heartbeat_interval),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=task.lighthouse,
        replica_id=f"replica{task.process}",
        hostname="127.0.0.1",
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    watch = Stopwatch(task, task.process, gate)

    def step() -> None:
        optimizer.zero_grad()
        error = loss(wrapped, batch)
        watch.in_forward(manager.current_step())
        error.backward()
        optimizer.step()

    if task.victim is None:
        blocks(gate, step)
    else:
        while not watch.is_done:
            step()
            watch.end(manager.current_step(), manager.num_participants())
        watch.report()
    manager.shutdown(wait=False)


def main() -> None:
    import torch

    task = Task(**json.loads(sys.argv[1]))
    signal.alarm(600)  # even if the benchmark is killed
    torch.set_num_threads(1)
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(task.address)
    gate = Connection(channel.detach())
    (torchft if task.way == "torchft" else horoplug)(task, gate)


if __name__ == "__main__":
    main()
