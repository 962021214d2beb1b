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
from horoplug.common.process_sets import process_set_id
from horoplug.common.reduction_options import ReductionOptions
from horoplug.common.status import is_layout_mismatch
from horoplug.common.variants import synchronize
from horoplug.torch import sparse, streams
from horoplug.torch.adapter import ADAPTER
from horoplug.torch.buckets import Bucket
from horoplug.torch.changes import Changes
from horoplug.torch.compression import CastCompressor, NoneCompressor
from horoplug.torch.grouping import Group
from horoplug.torch.mpi_ops import sparse_allreduce_async
from horoplug.torch.plain import is_plain

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

    def __init__(self, names: Mapping[torch.Tensor, str], options: ReductionOptions) -> None:
        self._names = names
        self._options = options
        self._compression = compression = options.compression
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
        # By parameter whose latest gradient was sparse: its number of sparse dimensions.
        self._sparse_dims: dict[torch.Tensor, int] = {}
        # Parameters without a gradient in this step, for which this rank has sent dense zeros.
        self._missing: set[torch.Tensor] = set()
        self._changes = Changes(names)

    def expect_sparse(self, parameters: Iterable[torch.Tensor]) -> None:
        """The gradients of these parameters are sparse, also before the first one exists."""
        self._sparse_dims.update(dict.fromkeys(parameters, 1))

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
            grad = tensor
            # A fast path for the usual case.
            if not (
                self._sends_as_is
                and known is not None
                and tensor is not None
                and tensor.dtype is known[0]
                and tensor.shape == known[1]
                and tensor.get_device() == known[2]
                and is_plain(tensor)
                and not tensor.requires_grad
            ):
                tensor, kept = self._pack(parameter)
                grad = parameter.grad
                if tensor.is_sparse:
                    self._note_changes([parameter], [cast(torch.Tensor, grad)])
                    handles[parameter] = self._submit_sparse(parameter, tensor), kept
                    continue
                known = self._known_as(parameter, tensor)
            if known[2] != device:
                device = known[2]
                reduced, grads, tensors, kept_all, prepared, addresses = by_device.setdefault(
                    device, ([], [], [], [], [], [])
                )
            reduced.append(parameter)
            grads.append(grad)
            tensors.append(tensor)
            kept_all.append(kept)
            prepared.append(known[3])
            addresses.append(tensor.data_ptr())
        for device, parts in by_device.items():
            reduced, grads, tensors, kept_all, prepared, addresses = parts
            self._note_changes(reduced, grads)
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
        self._note_changes(group, [cast(torch.Tensor, p.grad) for p in group])
        handle: Handle = list  # for a group without dense gradients
        if dense:
            call = self._call(self._names[group[0]])
            if len(dense) < len(packed):
                apart = [self._names[p] for p, tensor, _ in packed if tensor.is_sparse]
                call = call._replace(layout=f"a group without {', '.join(apart)}, which is sparse")
            tensors = [tensor for _, tensor, _ in dense]
            operation = submit(ADAPTER, _ALLREDUCE, tensors, call, grouped=True, in_place=True)
            self._groups.append((operation, dense))
            handle = operation.number
        for parameter in group:
            handles.pop(parameter, None)
        handles[group] = handle, [kept for _, _, kept in dense]
        for parameter, tensor, kept in packed:
            if tensor.is_sparse:
                # The group may have the name of this parameter.
                end = self._submit_sparse(parameter, tensor, ".sparse")
                handles[parameter] = end, kept

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
                self._note_changes(bucket, [cast(torch.Tensor, p.grad) for p in bucket])
            if batch.refused is not None:
                raise batch.refused

    def finish(self) -> None:
        """Wait for all submitted reductions, and store the results in the gradients.

        Raises HorovodInternalError if a reduction failed; the gradients are then undefined."""
        self._changes.warn()
        failed = self._wait()
        again = [parameter for parameter, failure in failed if is_layout_mismatch(failure)]
        if again and len(again) == len(failed) and all(p is not None for p in again):
            # Some ranks had no gradient and have sent dense zeros, while those of the others were sparse. All ranks
            # have got the same failures, so all of them repeat the same reductions.
            failed = self._reduce_again(cast(list[torch.Tensor], again))
        for _, failure in failed:
            raise failure
        for batch, parameters, kept_all in self._batches:
            done = zip(parameters, batch.tensors, kept_all, strict=False)
            for index, (parameter, tensor, kept) in enumerate(done):
                is_in_place = self._casts_only and tensor is parameter.grad
                if not is_in_place and index not in batch.failures:
                    self._take(parameter, tensor, kept)
        for _, members in self._groups:
            for member in members:
                self._take(*member)
        for parameter, end in self._sparse:
            parameter.grad = end()

    def _wait(self) -> list[tuple[torch.Tensor | None, Exception]]:
        """Wait for all submitted reductions, even if one fails: no buffer may be in use later. Returns the failures,
        each with its parameter, or with None if it concerns several."""
        failed: list[tuple[torch.Tensor | None, Exception]] = []
        for batch, parameters, _ in self._batches:
            failure = batch.wait()
            if failure is not None and not batch.failures:
                failed.append((None, failure))
            failed += [
                (parameters[i] if parameters else None, e) for i, e in batch.failures.items()
            ]
        for operation, _ in self._groups:
            with _collecting(failed, None):
                synchronize(operation.number)
        for parameter, end in self._sparse:
            with _collecting(failed, parameter):
                end()
        return failed

    def _reduce_again(
        self, parameters: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor | None, Exception]]:
        """Repeat the failed reductions of these parameters, with sparse zeros where this rank has no gradient."""
        repeated = set(parameters)
        batches, gathered = self._batches, [of for of in self._sparse if of[0] not in repeated]
        self._batches, self._sparse = [], []
        missing = self._missing & repeated
        self.expect_sparse(missing)
        for parameter in missing:
            parameter.grad = None
        self.submit(parameters, {})
        failed = self._wait()
        self._batches, self._sparse = batches + self._batches, gathered + self._sparse
        return failed

    def forget(self) -> None:
        """Forget all submitted reductions. The context keeps the tensors of those that are in flight."""
        self._batches.clear()
        self._groups.clear()
        self._sparse.clear()
        self._missing.clear()
        self._changes.forget()

    def _note_changes(self, parameters: Sequence[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """The gradients of these parameters are submitted now; the program must not change them."""
        self._changes.note(parameters, grads)

    def _pack(self, parameter: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send for a gradient, and the context for decompression. No gradient counts as zeros, which are
        sparse if the parameter's latest gradient was."""
        grad = parameter.grad
        if grad is None:
            grad = parameter.grad = self._zeros(parameter)
        grad = grad.detach() if grad.requires_grad else grad
        if grad.is_sparse:
            self._sparse_dims[parameter] = grad.sparse_dim()
            if not self._options.sparse_as_dense:
                return grad, None
            grad = grad.to_dense()
        tensor, kept = self._compress(grad)
        # A gradient in channels_last order is copied, since the order on other ranks may differ.
        if not is_plain(tensor) or tensor.requires_grad:
            tensor, *_ = ADAPTER.describe(tensor.detach(), in_place=False)
        return tensor, kept

    def _zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        sparse_dim = self._sparse_dims.get(parameter)
        if sparse_dim is not None:
            return sparse.zeros(parameter, sparse_dim)
        self._missing.add(parameter)
        return torch.zeros_like(parameter)

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
        self, parameter: torch.Tensor, tensor: torch.Tensor, suffix: str = ""
    ) -> Callable[[], torch.Tensor]:
        name = self._names[parameter] + suffix
        options = self._options
        end = sparse_allreduce_async(tensor, name, options.op, options.process_set)
        self._sparse.append((parameter, end))
        return end

    def _call(self, name: str | None) -> Call:
        options = self._options
        return Call(
            name,
            options.op,
            prescale=options.prescale,
            postscale=options.postscale,
            process_set=process_set_id(options.process_set),
            wire_dtype=self.wire_dtype,
        )


def _start(
    device: int,
    prepared: Sequence[Prepared],
    addresses: Sequence[int],
    tensors: Sequence[torch.Tensor],
) -> Batch:
    """Submit operations on tensors of one device."""
    stream = None if device == CPU else functools.partial(streams.current, device)
    return Batch(prepared, addresses, tensors, stream)


def _method(compression: Any, name: str) -> Any:
    """A method of a compressor as a plain function, for comparison with those of known classes."""
    method = getattr(compression, name, None)
    return getattr(method, "__func__", method)


@contextlib.contextmanager
def _collecting(
    failed: list[tuple[torch.Tensor | None, Exception]], parameter: torch.Tensor | None
) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failed.append((parameter, error))
