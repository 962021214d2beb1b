"""Submits the reductions of gradients, waits for them, and stores the results in ``parameter.grad``."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from horoplug._native import Prepared
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
"""The handle of a reduction, for ``synchronize``; for a sparse gradient, the function that returns the result; None:
not submitted yet."""

Handles = dict[Any, tuple[Handle, Any]]
"""Maps a parameter or group to its handle and the context for decompression; for a group, a list of contexts."""

Member = tuple[torch.Tensor, torch.Tensor, Any]
"""A parameter, the tensor that is sent and overwritten by the reduction, and the context for decompression."""


class Reducer:
    """Reduces gradients with the options of :func:`horoplug.torch.optimizer.DistributedOptimizer`."""

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
        # Whether gradients are usually sent without calling the compression, because the core casts them itself.
        self._sends_as_is = not self._compresses or self.wire_dtype != 0
        # Whether `decompress` need not be called, since copying a gradient back casts it as well.
        self._casts_only = _method(compression, "decompress") in (
            NoneCompressor.decompress,
            _method(CastCompressor, "decompress"),
        )
        # By parameter: dtype, shape and device of the tensor that is sent, and the reduction of such a tensor.
        self._known: dict[torch.Tensor, tuple[torch.dtype, torch.Size, int, Prepared]] = {}
        self._known_call = Call()
        self._batches: list[tuple[Batch, list[torch.Tensor], list[Any]]] = []
        self._groups: list[tuple[Operation | SplitGroup, list[Member]]] = []
        self._sparse: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []

    def submit(self, parameters: Iterable[torch.Tensor], handles: Handles) -> None:
        """Submit the gradients of these parameters, each by itself, and enter them in ``handles``.

        Raises as ``allreduce_async_`` does; the gradients before the refused one are then submitted."""
        call = self._call(None)
        if call != self._known_call:
            self._known_call = call
            self._known.clear()
        by_device: dict[int, tuple[list[Any], ...]] = {}
        device = None
        for parameter in parameters:
            tensor, kept, known = parameter.grad, None, self._known.get(parameter)
            # A fast path for the usual case.
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
            if known[2] != device:
                device = known[2]
                reduced, tensors, kept_all, prepared, addresses = by_device.setdefault(
                    device, ([], [], [], [], [])
                )
            reduced.append(parameter)
            tensors.append(tensor)
            kept_all.append(kept)
            prepared.append(known[3])
            addresses.append(tensor.data_ptr())
        for device, (reduced, tensors, kept_all, prepared, addresses) in by_device.items():
            batch = _start(device, prepared, addresses, tensors)
            self._batches.append((batch, reduced, kept_all))
            # The refused gradient and those after it have no handle.
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
        """Submit the dense gradients of a group as one operation, and each sparse one by itself."""
        packed = [(parameter, *self._pack(parameter)) for parameter in group]
        dense = [member for member in packed if not member[1].is_sparse]
        handle: Handle = list  # for a group without dense gradients
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
        """Submit the in-place reductions of buckets. Raises as :meth:`submit` does."""
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
            self._batches.append((batch, [], []))  # the results are in place
            for bucket, number in zip(there, batch.numbers, strict=False):
                for parameter in bucket:
                    handles.pop(parameter, None)
                handles[bucket] = number, None
            if batch.refused is not None:
                raise batch.refused

    def finish(self) -> None:
        """Wait for all submitted reductions, and store the results in the gradients.

        Raises HorovodInternalError if a reduction failed; the gradients are then undefined."""
        failures = [batch.wait() for batch, _, _ in self._batches]
        totals = []
        # Wait for all of them even if one fails: no buffer may be in use later.
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
        """Forget all submitted reductions. The context keeps the tensors of those that are in flight."""
        self._batches.clear()
        self._groups.clear()
        self._sparse.clear()

    def _pack(self, parameter: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send for a gradient, and the context for decompression. No gradient counts as zeros."""
        grad = parameter.grad
        if grad is None:
            grad = parameter.grad = torch.zeros_like(parameter)
        grad = grad.detach() if grad.requires_grad else grad
        if grad.is_sparse:
            if not self._sparse_as_dense:
                return grad, None
            grad = grad.to_dense()
        tensor, kept = self._compress(grad)
        # A gradient in channels_last order is copied, since the order on other ranks may differ.
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
        """Store a reduced gradient in ``parameter.grad``."""
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
    """Submit operations on tensors of one device."""
    stream = None if device == CPU else functools.partial(streams.current, device)
    return Batch(prepared, addresses, tensors, stream)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of the tensor can be sent without a copy."""
    return (
        not tensor.is_sparse
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_neg())
    )


def _method(compression: Any, name: str) -> Any:
    """A method of a compressor as a plain function, for comparison with those of known classes."""
    method = getattr(compression, name, None)
    return getattr(method, "__func__", method)


@contextlib.contextmanager
def _collecting(failures: list[Exception | None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failures.append(error)
