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
    """Decorator for a training function (``func``) whose first argument is its state (a :class:`TorchState`, or any
    :class:`horoplug.common.elastic.State`).

    Returns a function with the same arguments and result. When an operation raises HorovodInternalError, all ranks that
    are left restore the last ``state.commit()``, initialize again, maybe with other ranks, receive the state of rank 0,
    and call the function again. The function must resume from the progress in the state. After ten failures in a row
    without a commit between them, the error is raised to the caller.

    Example, on two ranks:

        @hvd.elastic.run
        def train(state, epochs):
            while state.epoch < epochs:
                loss = state.model(torch.ones(1, 2)).sum()
                state.optimizer.zero_grad()
                loss.backward()
                state.optimizer.step()
                state.epoch += 1
                state.commit()
            return state.epoch

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        train(hvd.elastic.TorchState(model, optimizer, epoch=0), 3)  # -> 3
    """
    return run_fn(func, initialize_again)
