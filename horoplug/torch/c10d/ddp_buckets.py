"""Names the parameters in a bucket of DistributedDataParallel, for the text of an error.

DistributedDataParallel does not tell: its C++ part holds a lock while it waits for the reductions, and every question
waits for that lock. The members of a bucket are found by their addresses, or by their sizes."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_MOST_NAMES = 6

Named = Sequence[tuple[str, torch.nn.Parameter]]


def parameters_in_bucket(group: Any, bucket: torch.Tensor) -> str:
    """The parameters whose gradients are in a bucket: "module.0.weight, module.0.bias". Empty if they cannot be told.

    It looks through all objects of the process, so it is for failures only. Never raises an Exception: the failure that
    it describes must reach the program."""
    for model in gc.get_objects():
        # isinstance would look at attributes of proxies.
        if not issubclass(type(model), DistributedDataParallel):
            continue
        try:
            found = _members(model, group, bucket)
        except Exception:
            continue  # it could not be built; or a tensor is of a kind that is unknown here
        if found:
            more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
            return ", ".join(found[:_MOST_NAMES]) + more
    return ""


def _members(model: Any, group: Any, bucket: torch.Tensor) -> list[str]:
    if model.process_group is not group:
        return []
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if bucket.layout is not torch.strided:  # a sparse gradient is a bucket of its own
        alike = [name for name, p in trained if p.shape == bucket.shape]
        return alike if len(alike) == 1 else []
    return _by_address(trained, bucket) or _by_size(trained, bucket)


def _by_address(trained: Named, bucket: torch.Tensor) -> list[str]:
    """With gradient_as_bucket_view, gradients are views of their bucket."""
    begin = bucket.data_ptr()
    end = begin + bucket.numel() * bucket.element_size()
    dense = [
        (name, p.grad)
        for name, p in trained
        if p.grad is not None and p.grad.layout is torch.strided
    ]
    return [name for name, grad in dense if begin <= grad.data_ptr() < end]


def _by_size(trained: Named, bucket: torch.Tensor) -> list[str]:
    """A bucket has the gradients of consecutive parameters, in the reverse order of the model, unless the model uses
    them in another order. Empty if several such runs have the size of the bucket."""
    backwards = list(reversed(trained))
    runs = []
    for begin in range(len(backwards)):
        elements = 0
        for end in range(begin, len(backwards)):
            elements += backwards[end][1].numel()
            if elements >= bucket.numel():
                break
        if elements == bucket.numel():
            runs.append([name for name, _ in backwards[begin : end + 1]])
    return runs[0] if len(runs) == 1 else []
