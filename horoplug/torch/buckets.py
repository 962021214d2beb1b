"""Gradients as views of shared memory: buckets, each reduced as one, in place.

The gradients of many parameters lie one behind the other in a bucket, which all ranks of a host map
(:class:`horoplug.common.buffers.SharedBuffer`); on a GPU it is memory of the device. Backward's results come into it as
soon as a hook sees them, and ``parameter.grad`` is a view of it from then on. So nothing is packed before the reduction
or unpacked after it, and an optimizer with a thousand parameters has a few operations instead of a thousand.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from horoplug._native import Prepared
from horoplug.common.buffers import SharedBuffer
from horoplug.common.compression import wire_dtype
from horoplug.common.context import context
from horoplug.common.objects import allgather_object, broadcast_object
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Adasum, resolve
from horoplug.torch.adapter import ADAPTER
from horoplug.torch.compression import NoneCompressor
from horoplug.torch.grouping import Group

BUCKET: Final = 4 << 20  # bytes: enough for the full rate, few enough to begin early
FIRST_BUCKET: Final = 1 << 20  # the sooner there is something to send the better
ALIGNMENT: Final = 64  # bytes of a cache line

_OPTION: Final = "gradient_as_bucket_view=True"


class Place(NamedTuple):
    """A gradient as all ranks have it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    on_gpu: bool

    @property
    def nbytes(self) -> int:
        """With what is left free behind it."""
        elements = 1
        for count in self.shape:
            elements *= count
        return -(-elements * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Bucket(Group):
    """Parameters whose gradients lie in one piece of memory, which is reduced as a whole."""

    name: str
    flat: torch.Tensor
    """The memory: one dimension. What lies between two gradients is zero, at first."""
    prepared: Prepared | None = None
    """The reduction, for the Reducer."""


class Buckets:
    """Those of one optimizer, in one job."""

    def __init__(self, buckets: Sequence[Bucket], views: dict[torch.Tensor, torch.Tensor]) -> None:
        self.job = job()
        self.buckets = buckets
        self._views = {p: (view, view.data_ptr()) for p, view in views.items()}
        # Others of the same memory, for when somebody has assigned to the data of a view.
        self._spare = {p: view.detach() for p, view in views.items()}

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Bring their gradients into the buckets, unless they are there, and make ``grad`` the view. None counts as
        zeros. Those that are part of a graph of their own (``create_graph=True``) stay what they are until
        :meth:`attach`.

        Raises ValueError for a sparse gradient."""
        lost, views, grads = [], [], []
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
                    f"{_OPTION}: the gradient of a parameter of shape {tuple(parameter.shape)} is sparse."
                )
            if (
                grad.data_ptr() == address
            ):  # another tensor on this memory, maybe with other strides
                grad = grad.clone()
            if view.data_ptr() != address:  # somebody has assigned to grad.data
                view = self._spare[parameter].detach()
                self._views[parameter] = view, address
            lost.append(parameter)
            views.append(view)
            grads.append(grad.detach() if grad.requires_grad else grad)
        if not lost:
            return
        _copy(views, grads)
        for parameter, view in zip(lost, views, strict=True):
            if not parameter.grad.requires_grad:  # type: ignore[union-attr]
                parameter.grad = view

    def attach(self) -> None:
        """Have every ``grad`` be the view: where :meth:`take` has left it alone, or somebody has changed it since."""
        for parameter, (view, _) in self._views.items():
            if parameter.grad is not view:
                parameter.grad = view


def _copy(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if hasattr(torch, "_foreach_copy_"):  # from PyTorch 2.2 on; half the time
        torch._foreach_copy_(to, of)
        return
    for view, grad in zip(to, of, strict=True):
        view.copy_(grad)


def job() -> Any:
    """Something that is the same object until the next ``init``."""
    return context.per_job.setdefault("gradient buckets", object())


def why_not(compression: Any, op: int, groups: Any, process_set: ProcessSet) -> str | None:
    """Which argument of ``DistributedOptimizer`` rules buckets out."""
    as_is = getattr(compression, "compress", None) is NoneCompressor.compress
    if not (as_is or wire_dtype(compression)):
        return "a compression of your own"
    if groups is not None:
        return "groups"
    if resolve(op) == Adasum:
        return "op=Adasum"
    if process_set is not global_process_set:
        return "a process_set"
    return None


def make_buckets(
    names: dict[torch.Tensor, str], parameters: Iterable[torch.Tensor], compressed: bool
) -> Buckets:
    """Buckets for the parameters, in the reverse order of ``names``: about the order in which backward computes the
    gradients. They lie in memory as on rank 0. Gradients stay where they are until they are taken.

    Collective: over all ranks. Raises ValueError on all of them if a parameter is none that can be in a bucket, or if
    the ranks' parameters differ."""
    wanted = set(parameters)
    ordered = [p for p in reversed(names) if p in wanted and p.numel() > 0]
    own = {names[p]: _place(p, names[p]) for p in ordered}
    places: list[Place] = broadcast_object(list(own.values()), 0, "gradients.layout")
    objection = _unfit(ordered, names, compressed) or _difference(own, places)
    for rank, theirs in enumerate(allgather_object(objection, "gradients.objections")):
        if theirs is not None:
            raise ValueError(f"{_OPTION}: {theirs} (rank {rank})")
    if not places:
        return Buckets([], {})
    parameter_of = {names[p]: p for p in ordered}
    divided = divide(places)
    memory = _memory(divided, ordered)
    begin = {False: 0, True: 0}
    buckets, views = [], {}
    for number, members in enumerate(divided):
        dtype, on_gpu = members[0].dtype, members[0].on_gpu
        nbytes = sum(place.nbytes for place in members)
        flat = memory[on_gpu].narrow(0, begin[on_gpu], nbytes).view(dtype)
        bucket = Bucket(parameter_of[place.name] for place in members)
        bucket.name = f"gradients.{places[0].name}.{number}"
        bucket.flat = flat
        offset = flat.storage_offset()
        for parameter, place in zip(bucket, members, strict=True):
            views[parameter] = flat.as_strided(place.shape, place.strides, offset)
            offset += place.nbytes // dtype.itemsize
        buckets.append(bucket)
        begin[on_gpu] += nbytes
    return Buckets(buckets, views)


def _memory(
    divided: Sequence[Sequence[Place]], parameters: Sequence[torch.Tensor]
) -> dict[bool, torch.Tensor]:
    """Zeroed bytes for all buckets, by whether they are on the GPU. Collective."""
    memory: dict[bool, torch.Tensor] = {}
    for on_gpu in sorted({members[0].on_gpu for members in divided}):
        nbytes = sum(p.nbytes for members in divided for p in members if p.on_gpu == on_gpu)
        if on_gpu:
            device = next(p.device for p in parameters if p.is_cuda)
            memory[on_gpu] = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)  # gradients may come on any stream
        else:
            memory[on_gpu] = torch.frombuffer(SharedBuffer(nbytes).view(), dtype=torch.uint8)
    return memory


def divide(places: Iterable[Place]) -> list[list[Place]]:
    """Cut a list of gradients into buckets of one dtype and kind of memory each, ordered by when they are full."""
    full: list[list[Place]] = []
    filling: dict[tuple[torch.dtype, bool], list[Place]] = {}
    for place in places:
        kind = place.dtype, place.on_gpu
        members = filling.setdefault(kind, [])
        members.append(place)
        if sum(p.nbytes for p in members) >= (BUCKET if full else FIRST_BUCKET):
            full.append(filling.pop(kind))
    return [*full, *filling.values()]


def _place(parameter: torch.Tensor, name: str) -> Place:
    # The parameter's strides if it is dense, and else such as a gradient has.
    strides = torch.empty_like(parameter, device="meta").stride()
    return Place(name, parameter.dtype, tuple(parameter.shape), strides, parameter.is_cuda)


def _unfit(
    parameters: Iterable[torch.Tensor], names: Mapping[torch.Tensor, str], compressed: bool
) -> str | None:
    cards = set()
    for p in parameters:
        if p.layout is not torch.strided or not p.dtype.is_floating_point:
            return f"{names[p]} is no dense floating-point parameter."
        if compressed and p.dtype is torch.float64:
            return f"{names[p]} is float64; compression in buckets is for float32."
        cards.update([p.device] if p.is_cuda else [])
        if len(cards) > 1:
            return f"{names[p]} is on another GPU than parameters before it."
        try:
            ADAPTER.describe(p.detach(), in_place=False)
        except (TypeError, ValueError) as error:
            return f"{names[p]}: {error}"
    return None


def _difference(own: Mapping[str, Place], places: Iterable[Place]) -> str | None:
    """What is different here from rank 0's."""
    theirs = {place.name: place for place in places}
    for name in [*theirs, *own]:
        here, there = own.get(name), theirs.get(name)
        if here is None or there is None:
            return f"only {'rank 0' if here is None else 'this rank'} has a parameter {name}."
        if here[:3] != there[:3] or here.on_gpu != there.on_gpu:
            return f"{name} is {_say(here)} here and {_say(there)} on rank 0."
    return None


def _say(place: Place) -> str:
    where = " on a GPU" if place.on_gpu else ""
    return f"{place.dtype} of shape {place.shape}{where}".removeprefix("torch.")
