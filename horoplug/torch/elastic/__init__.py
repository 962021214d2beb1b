"""Elastic training: training that continues after a failure.

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

In a job of ``horovodrun --min-np``, processes that fail are replaced: see :mod:`horoplug.common.elastic`.
"""

from collections.abc import Callable

from horoplug.common.elastic import Parameters, Result, initialize_again, run_fn
from horoplug.torch.elastic.sampler import ElasticSampler
from horoplug.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator for a training function whose first argument is its state (a :class:`TorchState`, or any
    :class:`horoplug.common.elastic.State`).

    When an operation raises HorovodInternalError, all ranks that are left restore the last ``state.commit()``,
    initialize again, maybe with other ranks, receive the state of rank 0, and call the function again. The function
    must resume from the progress in the state. After ten failures in a row without a commit between them, the error is
    raised to the caller."""
    return run_fn(func, initialize_again)
