"""``DistributedOptimizer``: an optimizer that averages the gradients of all ranks before each step."""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import torch

from horoplug.base.alias import public_name
from horoplug.base.errors import NotInitializedError, not_an_optimizer
from horoplug.common.compression import AnyCompressor
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Adasum, Average, check_ranks
from horoplug.torch import buckets
from horoplug.torch.adasum_optimizer import _DistributedAdasumOptimizer
from horoplug.torch.compression import Compression
from horoplug.torch.distributed_optimizer import _DistributedOptimizer
from horoplug.torch.grouping import Options

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: AnyCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    gradient_as_bucket_view: bool | None = None,
) -> Optimizer:
    """Wrap an optimizer so that ``step`` uses the gradients of all ranks. Use the result in place of the argument.

    ``named_parameters``: ``model.named_parameters()``. The names pair the gradients of the ranks and appear in
        messages. All parameters of the optimizer must be in it. By default, parameters are numbered.
    ``compression``: the dtype in which gradients are sent: ``Compression.none``, ``.fp16``, ``.bf16``, or a class of
        your own. The core itself casts float32 for these, at almost no cost; a class that derives from them is called
        for each gradient.
    ``backward_passes_per_step``: number of backward passes whose gradients are added locally before they are reduced;
        the sum is not divided.
    ``op``: how gradients are combined: Average, Sum, Min, Max, Product. With Adasum, the steps of the optimizer are
        combined instead of gradients (see :mod:`horoplug.torch.adasum_optimizer`), and groups and sparse_as_dense are
        ignored.
    ``gradient_predivide_factor``: with Average, divide by this factor before the sum and by size / factor after it, so
        that the sum does not overflow.
    ``groups``: gradients that are reduced together: the number of groups, or lists of parameters. (num_groups: its
        deprecated name.)
    ``sparse_as_dense``: convert sparse gradients to dense ones to reduce them, instead of gathering them.
    ``process_set``: the ranks over which gradients are reduced; other ranks use their own gradients.
    ``gradient_as_bucket_view``: True keeps the gradients in buckets of shared memory, which are reduced in place:
        nothing is packed or unpacked, and there are a few operations instead of one per parameter. This is fastest
        where gradients stay in place (accumulation, ``zero_grad(set_to_none=False)``) and where many are small. A hook
        makes ``parameter.grad`` a view of its bucket. References to the gradient from before ``zero_grad`` see the
        gradients of the next step, as with the argument of this name of DistributedDataParallel. On one host the
        results are bit-identical to those without buckets. On a GPU, buckets are in device memory and save operations
        only. The value must be the same on all ranks, all parameters must be dense and floating-point, and groups,
        Adasum, process sets, your own compression, and float64 together with fp16 or bf16 are not supported. None and
        False leave the gradients where they are.

    Returns an object of a class that derives from the optimizer's class and has its name. It shares the optimizer's
    parameter groups and state.

    Raises TypeError for an object that is not an optimizer, ValueError before ``init`` or ``add_process_set``, for
    invalid arguments, and with gradient_as_bucket_view=True for parameters that are not supported or differ between
    ranks (in an elastic job, after the first step). Backward or ``step`` then raises ValueError for a sparse gradient.

    Example, on two ranks:

        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25 * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        model(torch.ones(3, 2) * hvd.rank()).sum().backward()  # the gradients are 0 and 3
        optimizer.step()
        model.weight.detach()  # -> [[0.25, 0.25]]
    """
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise TypeError(not_an_optimizer("a torch.optim.Optimizer", optimizer))
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("the optimizer is already a DistributedOptimizer")
    options = Options(
        op=op,
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        num_groups=num_groups,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
    )
    if process_set.size() is None:  # gradients would silently not be reduced
        if process_set is global_process_set:
            raise NotInitializedError
        raise ValueError(f"{process_set} is not registered; call add_process_set(...) before")
    if gradient_as_bucket_view:
        obstacle = buckets.unsupported_argument(options)
        if obstacle is not None:
            raise ValueError(f"gradient_as_bucket_view=True cannot be combined with {obstacle}")
    base: type[_DistributedOptimizer] = _DistributedOptimizer
    if options.op == Adasum and process_set.included() and process_set.size() != 1:
        check_ranks(Adasum, process_set.size())
        base, options = _DistributedAdasumOptimizer, dataclasses.replace(options, groups=None)
    elif num_groups != 0:
        warnings.warn("num_groups= is deprecated: use groups=", DeprecationWarning, stacklevel=2)

    kind = type(optimizer)
    body = {"__module__": public_name(__name__), "__doc__": kind.__doc__, "_wrapped_class": kind}
    wrapped: Any = object.__new__(type(kind.__name__, (base, kind), body))
    wrapped._take_attributes(optimizer)
    wrapped._distribute(named_parameters, options, bool(gradient_as_bucket_view))
    return cast(Optimizer, wrapped)
