"""``sparse_allreduce_async``: the sum of sparse tensors as one operation of the core."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Final

import torch

from horoplug.common.ops import submit
from horoplug.common.opspec import BY_NAME, Call
from horoplug.common.process_sets import ProcessSet, global_process_set, process_set_id
from horoplug.common.reduce_ops import Average
from horoplug.common.variants import synchronize
from horoplug.torch import sparse
from horoplug.torch.adapter import ADAPTER

# Named like a dense allreduce, so that a rank whose tensor is dense is told from the others at once.
_SPARSE_ALLREDUCE: Final = dataclasses.replace(BY_NAME["allgather"], paired_as="allreduce")


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Sum sparse COO tensors over the ranks, by gathering their indices and values.

    ``tensor``: a sparse tensor of the same shape and dtype on all ranks, on the CPU or a GPU.
    ``name``: pairs the calls of the ranks; None: their order does.
    ``op``: Average; every other value stands for the sum.
    ``process_set``: the ranks that take part; by default all ranks of the job.

    Returns a function instead of a handle, as Horovod does. The function waits and returns the average for
    ``op=Average``, and the sum for every other ``op``, as a sparse tensor of the same shape that is not coalesced.

    Raises the exceptions of ``allgather_async``; the returned function raises HorovodInternalError if the ranks
    disagree about the sizes, the numbers of sparse and dense dimensions, the dtype or the reduction, or a rank has
    failed.

    Example, on two ranks:

        x = torch.sparse_coo_tensor([[hvd.rank()]], [2.0], [3])
        finish = hvd.sparse_allreduce_async(x, "rows", hvd.Sum)
        finish().to_dense()  # -> [2.0, 2.0, 0.0]
    """
    parts, layout = sparse.split(tensor, "average" if op == Average else "sum")
    call = Call(name, process_set=process_set_id(process_set), layout=layout)
    handle = submit(ADAPTER, _SPARSE_ALLREDUCE, parts, call, grouped=True).number

    @functools.cache  # both the user and the optimizer may call it
    def finish() -> torch.Tensor:
        divisor = process_set.size() if op == Average else None
        return sparse.join(synchronize(handle), tensor, divisor)

    return finish
