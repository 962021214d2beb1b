"""Buckets: memory that holds the gradients of many parameters and is reduced in place, as one tensor.

The gradients of a bucket are contiguous in a buffer that all ranks of a host map
(:class:`horoplug.common.buffers.SharedBuffer`), or, on a GPU, in device memory. A hook copies the result of backward
into the bucket and makes ``parameter.grad`` a view of it. Nothing is then packed before the reduction or unpacked after
it, and an optimizer with a thousand parameters submits a few operations instead of a thousand.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from horoplug._native import Prepared
from horoplug.common.buffers import SharedBuffer
from horoplug.common.compression import wire_dtype
from horoplug.common.context import context
from horoplug.common.objects import allgather_object, broadcast_object
from horoplug.common.process_sets import global_process_set
from horoplug.common.reduce_ops import Adasum
from horoplug.common.reduction_options import ReductionOptions
from horoplug.torch.adapter import ADAPTER
from horoplug.torch.compression import NoneCompressor
from horoplug.torch.grouping import Group

BUCKET_BYTES: Final = 4 << 20  # large enough for the full bandwidth, small enough to start early
FIRST_BUCKET_BYTES: Final = 1 << 20  # smaller, so that communication starts earlier
ALIGNMENT: Final = 64  # bytes, a cache line

_OPTION: Final = "gradient_as_bucket_view=True"


class GradientLayout(NamedTuple):
    """The layout of a gradient, the same on all ranks."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    on_gpu: bool

    @property
    def nbytes(self) -> int:
        """Bytes in a bucket, including padding."""
        elements = 1
        for count in self.shape:
            elements *= count
        return -(-elements * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Bucket(Group):
    """Parameters whose gradients are contiguous in memory and are reduced as one tensor."""

    name: str
    flat: torch.Tensor
    """The memory, as a tensor of one dimension. The padding between gradients is initially zero."""
    prepared: Prepared | None = None
    """The reduction; set by the Reducer."""


class Buckets:
    """The buckets of one optimizer, for one job."""

    def __init__(self, buckets: Sequence[Bucket], views: dict[torch.Tensor, torch.Tensor]) -> None:
        self.job = context.job
        self.buckets = buckets
        self._views = {p: (view, view.data_ptr()) for p, view in views.items()}
        # Further views of the same memory, used after the program has assigned to the data of a view.
        self._spare = {p: view.detach() for p, view in views.items()}

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Copy the gradients of these parameters into the buckets, unless they are there, and make ``grad`` the view.
        A missing gradient counts as zeros. Gradients that are part of a graph (``create_graph=True``) do not change
        until :meth:`attach`.

        Raises ValueError for a sparse gradient."""
        outside, views, grads = [], [], []
        for parameter in parameters:
            view, address = self._views[parameter]
            grad = parameter.grad
            if grad is view and grad.data_ptr() == address:
                continue
            if grad is None:
                view.zero_()
                parameter.grad = view
                continue
            if grad.layout is not torch.strided:
                raise ValueError(
                    f"{_OPTION}: the gradient of a parameter of shape {tuple(parameter.shape)} is sparse"
                )
            if grad.data_ptr() == address:
                # Another tensor in this memory, possibly with other strides.
                grad = grad.clone()
            if view.data_ptr() != address:  # the program has assigned to grad.data
                view = self._spare[parameter].detach()
                self._views[parameter] = view, address
            outside.append(parameter)
            views.append(view)
            grads.append(grad.detach() if grad.requires_grad else grad)
        if not outside:
            return
        _copy(views, grads)
        for parameter, view in zip(outside, views, strict=True):
            if not parameter.grad.requires_grad:  # type: ignore[union-attr]
                parameter.grad = view

    def attach(self) -> None:
        """Make every ``grad`` the view of its bucket, including those that :meth:`take` did not change and those that
        the program has replaced."""
        for parameter, (view, _) in self._views.items():
            if parameter.grad is not view:
                parameter.grad = view


def _copy(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if hasattr(torch, "_foreach_copy_"):  # since PyTorch 2.2; takes half the time of the loop below
        torch._foreach_copy_(to, of)
        return
    for view, grad in zip(to, of, strict=True):
        view.copy_(grad)


def unsupported_argument(options: ReductionOptions) -> str | None:
    """The argument of ``DistributedOptimizer`` that is not supported with buckets; None if all are supported."""
    as_is = getattr(options.compression, "compress", None) is NoneCompressor.compress
    if not (as_is or wire_dtype(options.compression)):
        return "a compression of your own"
    if options.groups is not None:
        return "groups"
    if options.op == Adasum:
        return "op=Adasum"
    if options.process_set is not global_process_set:
        return "a process_set"
    return None


def make_buckets(
    names: dict[torch.Tensor, str], parameters: Iterable[torch.Tensor], compressed: bool
) -> Buckets:
    """Create buckets for the parameters, in the reverse order of ``names``, which is about the order in which backward
    computes the gradients. The memory layout is that of rank 0. :meth:`Buckets.take` moves the gradients into the
    buckets. ``compressed``: the gradients are sent in 16 bits.

    Collective over all ranks. Raises ValueError on all of them if a parameter is not supported in buckets, or if the
    parameters of the ranks differ."""
    wanted = set(parameters)
    ordered = [p for p in reversed(names) if p in wanted and p.numel() > 0]
    own = {names[p]: _layout_of(p, names[p]) for p in ordered}
    layouts: list[GradientLayout] = broadcast_object(list(own.values()), 0, "gradients.layout")
    objection = _unsupported(ordered, names, compressed) or _difference(own, layouts)
    for rank, theirs in enumerate(allgather_object(objection, "gradients.objections")):
        if theirs is not None:
            raise ValueError(f"{_OPTION}: {theirs} (rank {rank})")
    if not layouts:
        return Buckets([], {})
    parameter_of = {names[p]: p for p in ordered}
    divided = divide(layouts)
    memory = _memory(divided, ordered)
    begin = {False: 0, True: 0}
    buckets, views = [], {}
    for number, members in enumerate(divided):
        dtype, on_gpu = members[0].dtype, members[0].on_gpu
        nbytes = sum(layout.nbytes for layout in members)
        flat = memory[on_gpu].narrow(0, begin[on_gpu], nbytes).view(dtype)
        bucket = Bucket(parameter_of[layout.name] for layout in members)
        bucket.name = f"gradients.{layouts[0].name}.{number}"
        bucket.flat = flat
        offset = flat.storage_offset()
        for parameter, layout in zip(bucket, members, strict=True):
            # `data`: without it, all views would share one count of versions (see changes.py).
            views[parameter] = flat.as_strided(layout.shape, layout.strides, offset).data
            offset += layout.nbytes // dtype.itemsize
        buckets.append(bucket)
        begin[on_gpu] += nbytes
    return Buckets(buckets, views)


def _memory(
    divided: Sequence[Sequence[GradientLayout]], parameters: Sequence[torch.Tensor]
) -> dict[bool, torch.Tensor]:
    """Zeroed bytes for all buckets, by whether they are on a GPU. Collective."""
    memory: dict[bool, torch.Tensor] = {}
    for on_gpu in sorted({members[0].on_gpu for members in divided}):
        nbytes = sum(p.nbytes for members in divided for p in members if p.on_gpu == on_gpu)
        if on_gpu:
            device = next(p.device for p in parameters if p.is_cuda)
            memory[on_gpu] = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)  # gradients may be computed in any stream
        else:
            memory[on_gpu] = torch.frombuffer(SharedBuffer(nbytes).view(), dtype=torch.uint8)
    return memory


def divide(layouts: Iterable[GradientLayout]) -> list[list[GradientLayout]]:
    """Divide a list of gradients into buckets with one dtype and kind of memory each, in the order in which backward
    completes them."""
    full: list[list[GradientLayout]] = []
    filling: dict[tuple[torch.dtype, bool], list[GradientLayout]] = {}
    for layout in layouts:
        kind = layout.dtype, layout.on_gpu
        members = filling.setdefault(kind, [])
        members.append(layout)
        if sum(p.nbytes for p in members) >= (BUCKET_BYTES if full else FIRST_BUCKET_BYTES):
            full.append(filling.pop(kind))
    return [*full, *filling.values()]


def _layout_of(parameter: torch.Tensor, name: str) -> GradientLayout:
    # The strides of a dense parameter, otherwise those that its gradient will have.
    strides = torch.empty_like(parameter, device="meta").stride()
    return GradientLayout(name, parameter.dtype, tuple(parameter.shape), strides, parameter.is_cuda)


def _unsupported(
    parameters: Iterable[torch.Tensor], names: Mapping[torch.Tensor, str], compressed: bool
) -> str | None:
    devices = set()
    for p in parameters:
        if p.layout is not torch.strided or not p.dtype.is_floating_point:
            return f"{names[p]} is not a dense floating-point parameter"
        if compressed and p.dtype is torch.float64:
            return f"{names[p]} is float64; compression in buckets is for float32"
        devices.update([p.device] if p.is_cuda else [])
        if len(devices) > 1:
            return f"{names[p]} is on another GPU than parameters before it"
        try:
            ADAPTER.describe(p.detach(), in_place=False)
        except (TypeError, ValueError) as error:
            return f"{names[p]}: {error}"
    return None


def _difference(own: Mapping[str, GradientLayout], layouts: Iterable[GradientLayout]) -> str | None:
    """Describe the first difference between this rank's gradients and those of rank 0; None if there is none."""
    theirs = {layout.name: layout for layout in layouts}
    for name in [*theirs, *own]:
        here, there = own.get(name), theirs.get(name)
        if here is None or there is None:
            return f"only {'rank 0' if here is None else 'this rank'} has a parameter {name}"
        if here[:3] != there[:3] or here.on_gpu != there.on_gpu:
            return f"{name} is {_describe(here)} here and {_describe(there)} on rank 0"
    return None


def _describe(layout: GradientLayout) -> str:
    where = " on a GPU" if layout.on_gpu else ""
    return f"{layout.dtype} of shape {layout.shape}{where}".removeprefix("torch.")
