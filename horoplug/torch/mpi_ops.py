"""All operations on PyTorch tensors, and the functions of the job. (The module's name is Horovod's; it does not use
MPI.)"""

import functools
from collections.abc import Callable

import torch

from horoplug.common.api import *  # noqa: F403
from horoplug.common.objects import allgather_object as allgather_object
from horoplug.common.objects import broadcast_object as broadcast_object
from horoplug.common.objects import recv_object as recv_object
from horoplug.common.objects import send_object as send_object
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average
from horoplug.common.variants import barrier as barrier
from horoplug.common.variants import join as join
from horoplug.common.variants import poll as poll
from horoplug.common.variants import synchronize as synchronize
from horoplug.torch.operations import *  # noqa: F403
from horoplug.torch.operations import allgather_async


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Sum sparse COO tensors over the ranks, by gathering their indices and values.

    Returns a function instead of a handle, as Horovod does. The function waits and returns the average for
    ``op=Average``, and the sum for every other ``op``, as a sparse tensor of the same shape that is not coalesced.

    Raises the exceptions of ``allgather_async``; the returned function raises HorovodInternalError if the ranks
    disagree or a rank has failed."""
    coalesced = tensor.coalesce()
    indices = coalesced.indices().t().contiguous()
    values = coalesced.values()
    handles = [
        allgather_async(part, name and f"{name}.{suffix}", process_set)
        for part, suffix in ((indices, "indices"), (values, "values"))
    ]

    @functools.cache  # both the user and the optimizer may call it
    def finish() -> torch.Tensor:
        indices, values = (synchronize(handle) for handle in handles)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.size(), check_invariants=False)

    return finish
