"""Each asynchronous operation, by its kind."""

import horovod.torch as hvd

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
