"""Broadcast of model parameters and optimizer state, so that all ranks start from the same state."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from horoplug.base.errors import not_an_optimizer
from horoplug.common.basics import rank
from horoplug.common.objects import allgather_object as allgather_object
from horoplug.common.objects import broadcast_object as broadcast_object
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.variants import synchronize
from horoplug.torch.operations import broadcast_async_


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters with those of rank `root_rank` (a global rank), on the ranks of the set.

    ``params``: ``model.state_dict()``, ``model.named_parameters()``, or an iterable of tensors. Values that are not
    tensors are skipped. ``process_set``: by default all ranks of the job. Raises ValueError for anything else, and
    HorovodInternalError if shapes or dtypes differ between ranks or a rank has failed.

    Example, on two ranks:

        model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(model.weight, 5.0 + hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        model.weight.detach()  # -> [[5.0, 5.0]]
    """
    if isinstance(params, Mapping):
        items = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        items = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(
            "broadcast_parameters takes a state_dict, named_parameters or a list of tensors, got "
            f"{type(params).__name__}"
        )
    tensors = [(name, tensor) for name, tensor in items if isinstance(tensor, torch.Tensor)]
    _broadcast_in_place(tensors, root_rank, process_set)


def _broadcast_in_place(
    named: Iterable[tuple[str | None, torch.Tensor]], root_rank: int, process_set: ProcessSet
) -> None:
    handles = [
        broadcast_async_(tensor.detach(), root_rank, name, process_set) for name, tensor in named
    ]
    for handle in handles:
        synchronize(handle)


@dataclass(frozen=True)
class _Slot:
    """Placeholder for a tensor in the pickled state of an optimizer; the tensor is sent separately."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


_SENT = (_Slot, torch.Tensor)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank of the set the state (momenta, step counts, ...) and options (learning rate, ...) of the
    optimizer of rank `root_rank` (a global rank).

    State that only the root has is created, and state that only other ranks have is dropped. Parameters are not
    changed. As in Horovod, parameters of an optimizer that has not stepped yet get gradients of zeros if they have
    none, except for parameters with sparse gradients: those of SparseAdam, and embeddings of ``model``.

    Raises TypeError for an object that is not an optimizer, and ValueError for LBFGS, which is not supported as in
    Horovod, and on ranks whose optimizer has other numbers of parameters or groups than the root's.

    ``process_set``: by default all ranks of the job.

    Example, on two ranks:

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer.param_groups[0]["lr"]  # -> 0.1
    """
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise TypeError(
            not_an_optimizer("a torch.optim.Optimizer", optimizer, "broadcast_optimizer_state")
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state does not support torch.optim.LBFGS")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not optimizer.state and not isinstance(optimizer, torch.optim.SparseAdam):
        _zero_missing_gradients(parameters, model)
    tensors: list[torch.Tensor] = []
    described = None
    if rank() == root_rank:

        def describe(tensor: torch.Tensor) -> _Slot | torch.Tensor:
            if tensor.layout is not torch.strided:  # such as the momentum of a sparse gradient
                return tensor.cpu()
            tensors.append(tensor)
            return _Slot(len(tensors) - 1, tuple(tensor.shape), tensor.dtype, tensor.is_cpu)

        options = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        state = [optimizer.state.get(p) for p in parameters]
        # Some optimizers have state of their own beside that of the parameters, under names.
        others = _others(optimizer)
        whole = len(parameters), options, state, others
        described = _map(torch.Tensor, describe, whole), len(tensors)
    (count, options, state, others), sent = broadcast_object(
        described, root_rank, "optimizer_state", process_set
    )

    if rank() != root_rank:
        tensors = [torch.empty(0)] * sent

        def make(slot: _Slot | torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
            if isinstance(slot, torch.Tensor):
                return slot if like is None else slot.to(like.device)
            device = None if slot.on_cpu or like is None else like.device
            made = torch.empty(slot.shape, dtype=slot.dtype, device=device)
            tensors[slot.number] = made
            return made

        # A tensor that is on a GPU on the root goes to the device of this rank's parameter.
        first = parameters[0] if parameters else None
        options = _map(_SENT, functools.partial(make, like=first), options)
        others = _map(_SENT, functools.partial(make, like=first), others)
        state = [
            _map(_SENT, functools.partial(make, like=like), entry)
            for entry, like in zip(state, [*parameters, *[first] * len(state)], strict=False)
        ]
    named = ((f"optimizer_state.{n}", tensor) for n, tensor in enumerate(tensors))
    _broadcast_in_place(named, root_rank, process_set)
    if rank() != root_rank:
        # Checked after the broadcast, so that other ranks do not wait for this one.
        if count != len(parameters) or len(options) != len(optimizer.param_groups):
            raise ValueError(
                f"the optimizer of rank {root_rank} has {count} parameters in {len(options)} groups, "
                f"this one {len(parameters)} in {len(optimizer.param_groups)}: build the same one on "
                "every rank"
            )
        _take_over(optimizer, parameters, options, state)
        for key in _others(optimizer):
            del optimizer.state[key]
        optimizer.state.update(others)


def _others(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """The state of an optimizer that does not belong to a parameter, such as a step count of MADGRAD."""
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}


def _zero_missing_gradients(
    parameters: Iterable[torch.Tensor], model: torch.nn.Module | None
) -> None:
    sparse = {
        module.weight
        for module in (model.modules() if model else ())
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }
    for p in parameters:
        if p.requires_grad and p.grad is None and p not in sparse:
            p.grad = torch.zeros_like(p)


def _take_over(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor],
    options: list[dict[str, Any]],
    state: list[dict[str, Any] | None],
) -> None:
    # In place, since schedulers and wrappers refer to the same groups.
    for group, received in zip(optimizer.param_groups, options, strict=True):
        for key, value in received.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    for parameter, entry in zip(parameters, state, strict=True):
        if entry is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = entry


def _map(kind: type | tuple[type, ...], function: Callable[[Any], Any], tree: Any) -> Any:
    """Copy nested dicts, lists and tuples, with ``function`` applied to values of type ``kind``."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _map(kind, function, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map(kind, function, value) for value in tree)
    return tree
