"""Training that goes on after a failure.

@hvd.elastic.run
def train(state):
    while state.epoch < 10:
        for batch, (x, y) in enumerate(loader):
            ...
            state.sampler.record_batch(batch, len(x))
            if batch % 100 == 0:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)

train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))

For now with the processes that the job was started with: see :mod:`horoplug.common.elastic`.
"""

from collections.abc import Callable
from typing import Any

from horoplug.common.elastic import run_fn
from horoplug.torch.elastic.sampler import ElasticSampler
from horoplug.torch.elastic.state import TorchState
from horoplug.torch.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function whose first argument is its state (a :class:`TorchState`, or any
    :class:`horoplug.common.elastic.State`).

    When an operation fails on HorovodInternalError, all ranks go back to the last ``state.commit()``, start anew, take
    over the state of rank 0, and the function is called again. It should use collective operations only in what it
    calls, and begin where the state says."""
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
