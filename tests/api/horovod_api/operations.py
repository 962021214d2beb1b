"""Each asynchronous operation, by its kind, and a check that operations are asynchronous."""

import horovod.torch as hvd
import torch

SUBMIT = {
    "allreduce": hvd.allreduce_async,
    "allreduce_": hvd.allreduce_async_,
    "allgather": hvd.allgather_async,
    "broadcast": lambda tensor, name: hvd.broadcast_async(tensor, root_rank=0, name=name),
    "broadcast_": lambda tensor, name: hvd.broadcast_async_(tensor, root_rank=0, name=name),
    "alltoall": lambda tensor, name: hvd.alltoall_async(
        tensor, [17] + [0] * (hvd.size() - 1), name
    ),
    "reducescatter": hvd.reducescatter_async,
    "grouped_allreduce": lambda tensor, name: hvd.grouped_allreduce_async([tensor], name=name),
    "grouped_allgather": lambda tensor, name: hvd.grouped_allgather_async([tensor], name=name),
    "grouped_reducescatter": lambda tensor, name: hvd.grouped_reducescatter_async(
        [tensor], name=name
    ),
}


def submit_without_last_rank(submit):
    """The handles that ``submit()`` returns.

    The last rank calls ``submit()`` only after all the others have called it and have seen that no operation is done.
    A call that blocks until its operation is done therefore never returns.
    """

    def wait_for_the_others():
        hvd.allreduce(torch.ones(1), name="no operation is done on the other ranks")

    is_last = hvd.rank() == hvd.size() - 1
    if is_last:
        wait_for_the_others()
    handles = submit()
    if not is_last:
        assert not any(hvd.poll(handle) for handle in handles)
        wait_for_the_others()
    return handles
