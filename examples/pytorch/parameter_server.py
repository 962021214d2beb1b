"""Two programs of PyTorch's older interfaces, written for horoplug.

    horovodrun -np 3 python examples/pytorch/parameter_server.py --as data-parallel
    horovodrun -np 3 python examples/pytorch/parameter_server.py --as parameter-server

data-parallel: what torch.nn.DataParallel does in the threads of one process. Rank 0 has the whole batches, and every
process computes on a part of each.

parameter-server: what programs do with torch.distributed.rpc. Rank 0 has the parameters. The workers, which are all
other ranks, call its methods with objects as arguments and results. The server applies each gradient when it arrives.
"""

import argparse
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import horoplug.torch as hvd

INPUTS, BATCH = 8, 30


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int, worker: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(BATCH, INPUTS, generator=generator)
    return inputs, inputs[:, :1] * inputs[:, 1:2]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


# ---- instead of torch.nn.DataParallel -------------------------------------------------------------------------------


def data_parallel(steps: int) -> nn.Module:
    """Train on batches that only rank 0 has. Returns the model, which is the same on every rank."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The parts of a batch may differ in size, so each rank weights its gradients, and they are added.
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(steps):
        whole = batch(step) if hvd.rank() == 0 else (torch.empty(0, INPUTS), torch.empty(0, 1))
        inputs, targets = (hvd.scatter(tensor, root_rank=0) for tensor in whole)
        optimizer.zero_grad()
        (loss_of(model, inputs, targets) * len(inputs) / BATCH).backward()
        optimizer.step()
    return model


# ---- instead of torch.distributed.rpc -------------------------------------------------------------------------------

CALLS, ANSWERS = 1, 2  # tags


def call(server: int, method: str, *arguments: Any) -> Any:
    """Call a method of the object that rank ``server`` serves, as rpc_sync does. Exceptions are raised here."""
    hvd.send_object((method, arguments), server, CALLS)
    is_error, result = hvd.recv_object(server, ANSWERS)
    if is_error:
        raise result
    return result


def stop(server: int) -> None:
    """Tell a server that this rank calls it no more."""
    hvd.send_object(None, server, CALLS)


def serve(target: object, workers: Iterable[int]) -> None:
    """Answer the calls of ``workers``, each in a thread of its own, until all of them have called :func:`stop`."""
    threads = [threading.Thread(target=_answer, args=(target, worker)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _answer(target: object, worker: int) -> None:
    while (request := hvd.recv_object(worker, CALLS)) is not None:
        method, arguments = request
        try:
            answer = False, getattr(target, method)(*arguments)
        except Exception as error:
            answer = True, error
        hvd.send_object(answer, worker, ANSWERS)


class ParameterServer:
    """The parameters and their optimizer. Its methods are called from several threads."""

    def __init__(self) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.updates = 0
        self._lock = threading.Lock()

    def parameters(self) -> dict[str, torch.Tensor]:
        with self._lock:
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def update(self, gradients: dict[str, torch.Tensor]) -> int:
        """Apply the gradients of one worker. Returns the number of updates so far."""
        with self._lock:
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[name]
            self.optimizer.step()
            self.updates += 1
            return self.updates


def work(server: int, steps: int) -> None:
    """Compute gradients for the server."""
    model = network()
    for step in range(steps):
        model.load_state_dict(call(server, "parameters"))
        model.zero_grad()
        loss_of(model, *batch(step, hvd.rank())).backward()
        call(server, "update", {name: p.grad for name, p in model.named_parameters()})
    stop(server)


def parameter_server(steps: int) -> ParameterServer | None:
    """Train. Returns the server on rank 0."""
    if hvd.rank() != 0:
        work(0, steps)
        return None
    server = ParameterServer()
    serve(server, range(1, hvd.size()))
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--as", dest="kind", choices=["data-parallel", "parameter-server"])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    hvd.init()
    test = batch(0, 99)
    if arguments.kind == "data-parallel":
        model = data_parallel(arguments.steps)
    else:
        server = parameter_server(arguments.steps)
        model = server.model if server else network()
    if hvd.rank() == 0:
        before, after = (loss_of(each, *test).item() for each in (network(), model))
        print(f"loss before {before:.3f}, after {after:.3f}")


if __name__ == "__main__":
    main()
