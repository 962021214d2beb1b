"""Gradients on their way: submitted, waited for, and put where the optimizer looks for them."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from horoplug._native import Prepared
from horoplug.base.errors import HorovodInternalError
from horoplug.common.batch import Batch, prepare
from horoplug.common.compression import is_cast_by_core, wire_dtype
from horoplug.common.ops import CPU, Operation, SplitGroup, submit
from horoplug.common.opspec import BY_NAME, Call
from horoplug.common.process_sets import ProcessSet, process_set_id
from horoplug.common.variants import synchronize
from horoplug.torch import streams
from horoplug.torch.adapter import ADAPTER
from horoplug.torch.buckets import Bucket
from horoplug.torch.compression import CastCompressor, NoneCompressor
from horoplug.torch.grouping import Group
from horoplug.torch.mpi_ops import sparse_allreduce_async

_ALLREDUCE = BY_NAME["allreduce"]

Handle = Any
"""Of a reduction, for ``synchronize``; the function that ends it, for a sparse one; None: not submitted yet."""

Handles = dict[Any, tuple[Handle, Any]]
"""By parameter or group: its handle, and what decompression needs (of a group: a list)."""

Member = tuple[torch.Tensor, torch.Tensor, Any]
"""A parameter, its gradient as it is sent (the reduction overwrites it), and what decompression needs."""


class Reducer:
    """Reduces gradients as the options of ``DistributedOptimizer`` say; see there."""

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        compression: Any,
        op: int,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._names = names
        self._compression = compression
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._compresses = _method(compression, "compress") is not NoneCompressor.compress
        self.wire_dtype = wire_dtype(compression)
        # Whether gradients are usually handed over as they are: the core may cast them on its own.
        self._sends_as_is = not self._compresses or self.wire_dtype != 0
        # What need not be called, since copying a gradient back casts on its own.
        self._casts_only = _method(compression, "decompress") in (
            NoneCompressor.decompress,
            _method(CastCompressor, "decompress"),
        )
        # By parameter: dtype, shape and device of its gradient as it is sent, and the reduction of such a tensor.
        self._known: dict[torch.Tensor, tuple[torch.dtype, torch.Size, int, Prepared]] = {}
        self._known_call = Call()
        self._batches: list[tuple[Batch, list[torch.Tensor], list[Any]]] = []
        self._groups: list[tuple[Operation | SplitGroup, list[Member]]] = []
        self._sparse: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []

    def submit(self, parameters: Iterable[torch.Tensor], handles: Handles) -> None:
        """Reduce their gradients, each by itself, and enter them in ``handles``.

        Raises what ``allreduce_async_`` does; those before the one that is refused are on their way then."""
        call = self._call(None)
        if call != self._known_call:
            self._known_call = call
            self._known.clear()
        by_device: dict[int, tuple[list[Any], ...]] = {}
        at = None
        for parameter in parameters:
            tensor, kept, known = parameter.grad, None, self._known.get(parameter)
            # The usual case in short.
            if not (
                self._sends_as_is
                and known is not None
                and tensor is not None
                and tensor.dtype is known[0]
                and tensor.shape == known[1]
                and tensor.get_device() == known[2]
                and _plain(tensor)
            ):
                tensor, kept = self._pack(parameter)
                if tensor.is_sparse:
                    handles[parameter] = self._submit_sparse(parameter, tensor), kept
                    continue
                known = self._known_as(parameter, tensor)
            if known[2] != at:
                at = known[2]
                reduced, tensors, kept_all, prepared, addresses = by_device.setdefault(
                    at, ([], [], [], [], [])
                )
            reduced.append(parameter)
            tensors.append(tensor)
            kept_all.append(kept)
            prepared.append(known[3])
            addresses.append(tensor.data_ptr())
        for device, (reduced, tensors, kept_all, prepared, addresses) in by_device.items():
            batch = _start(device, prepared, addresses, tensors)
            self._batches.append((batch, reduced, kept_all))
            # What was refused has no number.
            handles.update(zip(reduced, zip(batch.numbers, kept_all, strict=False), strict=False))
            if batch.refused is not None:
                raise batch.refused

    def _known_as(
        self, parameter: torch.Tensor, tensor: torch.Tensor
    ) -> tuple[torch.dtype, torch.Size, int, Prepared]:
        known = self._known.get(parameter)
        found = tensor.dtype, tensor.shape, tensor.get_device()
        if known is not None and known[:3] == found:
            return known
        call = self._known_call._replace(name=self._names[parameter])
        _, code, _, _, device = ADAPTER.describe(tensor, in_place=True)
        known = (
            tensor.dtype,
            tensor.shape,
            device,
            prepare(_ALLREDUCE, call, code, tensor.shape, device),
        )
        self._known[parameter] = known
        return known

    def submit_group(self, group: Group, handles: Handles) -> None:
        """Reduce the gradients of a group as one, but for sparse ones."""
        packed = [(parameter, *self._pack(parameter)) for parameter in group]
        dense = [member for member in packed if not member[1].is_sparse]
        handle: Handle = list  # ends a reduction of nothing
        if dense:
            call = self._call(self._names[group[0]])
            tensors = [tensor for _, tensor, _ in dense]
            operation = submit(ADAPTER, _ALLREDUCE, tensors, call, grouped=True, in_place=True)
            self._groups.append((operation, dense))
            handle = operation.number
        for parameter in group:
            handles.pop(parameter, None)
        handles[group] = handle, [kept for _, _, kept in dense]
        for parameter, tensor, kept in packed:
            if tensor.is_sparse:
                handles[parameter] = self._submit_sparse(parameter, tensor), kept

    def submit_buckets(self, buckets: Sequence[Bucket], handles: Handles) -> None:
        """Reduce each where it is. Raises as :meth:`submit` does."""
        for bucket in buckets:
            if bucket.prepared is None:
                call, flat = self._call(bucket.name), bucket.flat
                _, code, _, shape, device = ADAPTER.describe(flat, in_place=True)
                bucket.prepared = prepare(_ALLREDUCE, call, code, shape, device)
        for device in {bucket.flat.get_device(): None for bucket in buckets}:
            there = [bucket for bucket in buckets if bucket.flat.get_device() == device]
            prepared = [bucket.prepared for bucket in there if bucket.prepared is not None]
            tensors = [bucket.flat for bucket in there]
            batch = _start(device, prepared, [tensor.data_ptr() for tensor in tensors], tensors)
            self._batches.append((batch, [], []))  # there is nothing to take over
            for bucket, number in zip(there, batch.numbers, strict=False):
                for parameter in bucket:
                    handles.pop(parameter, None)
                handles[bucket] = number, None
            if batch.refused is not None:
                raise batch.refused

    def finish(self) -> None:
        """Wait for all that was submitted, and put the results into the gradients.

        Raises HorovodInternalError if a reduction failed; the gradients are then undefined."""
        failures = [batch.wait() for batch, _, _ in self._batches]
        totals = []
        # Whatever fails, the others are waited for: no buffer may be in use later.
        for operation, _ in self._groups:
            with _collecting(failures):
                synchronize(operation.number)
        for parameter, end in self._sparse:
            with _collecting(failures):
                totals.append((parameter, end()))
        for failure in failures:
            if failure is not None:
                raise failure
        for batch, parameters, kept_all in self._batches:
            done = zip(parameters, batch.tensors, kept_all, strict=False)
            for parameter, tensor, kept in done:
                if not (self._casts_only and tensor is parameter.grad):
                    self._take(parameter, tensor, kept)
        for _, members in self._groups:
            for member in members:
                self._take(*member)
        for parameter, total in totals:
            parameter.grad = total

    def forget(self) -> None:
        """Let go of what was submitted. (The core keeps the tensors of what it has not done yet.)"""
        self._batches.clear()
        self._groups.clear()
        self._sparse.clear()

    def _pack(self, parameter: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The gradient as it is to be sent, and what decompression needs. No gradient counts as zeros."""
        grad = parameter.grad
        if grad is None:
            grad = parameter.grad = torch.zeros_like(parameter)
        grad = grad.detach() if grad.requires_grad else grad
        if grad.is_sparse:
            if not self._sparse_as_dense:
                return grad, None
            grad = grad.to_dense()
        tensor, kept = self._compress(grad)
        # A gradient in channels_last order takes a copy: the order of another rank's may differ.
        if not _plain(tensor):
            tensor, *_ = ADAPTER.describe(tensor.detach(), in_place=False)
        return tensor, kept

    def _compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not self._compresses or is_cast_by_core(self._compression, tensor):
            return tensor, None
        return cast(tuple[torch.Tensor, Any], self._compression.compress(tensor))

    def _decompress(self, tensor: torch.Tensor, kept: Any) -> torch.Tensor:
        if self._casts_only:
            return tensor
        return cast(torch.Tensor, self._compression.decompress(tensor, kept))

    def _take(self, parameter: torch.Tensor, tensor: torch.Tensor, kept: Any) -> None:
        """Put a reduced gradient where the optimizer looks for it."""
        grad = parameter.grad
        tensor = self._decompress(tensor, kept)
        if grad is None:
            parameter.grad = tensor.to(parameter.dtype)
        elif grad.is_sparse:
            parameter.grad = tensor.to(grad.dtype).to_sparse(grad.sparse_dim())
        elif tensor is not grad:
            grad.copy_(tensor)

    def _submit_sparse(
        self, parameter: torch.Tensor, tensor: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        end = sparse_allreduce_async(tensor, self._names[parameter], self._op, self._process_set)
        self._sparse.append((parameter, end))
        return end

    def _call(self, name: str | None) -> Call:
        factor, number = self._predivide, process_set_id(self._process_set)
        return Call(name, self._op, 0, 1.0 / factor, factor, None, number, self.wire_dtype)


def _start(
    device: int,
    prepared: Sequence[Prepared],
    addresses: Sequence[int],
    tensors: Sequence[torch.Tensor],
) -> Batch:
    """Submit what is on one device."""
    stream = None if device == CPU else functools.partial(streams.current, device)
    return Batch(prepared, addresses, tensors, stream)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether its memory can be sent as it is."""
    return (
        not tensor.is_sparse
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_neg())
    )


def _method(compression: Any, name: str) -> Any:
    """A compressor's method as the class has it that defines it, so that it can be recognised."""
    method = getattr(compression, name, None)
    return getattr(method, "__func__", method)


@contextlib.contextmanager
def _collecting(failures: list[Exception | None]) -> Iterator[None]:
    try:
        yield
    except HorovodInternalError as error:
        failures.append(error)
