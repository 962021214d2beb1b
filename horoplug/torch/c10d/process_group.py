"""The process group of the backend "horoplug" of ``torch.distributed``.

Every group has an engine of its own, so that groups neither wait for nor fail with each other. A call of
``torch.distributed`` becomes one submission to the engine, as in :mod:`horoplug.common.ops`. The calls have no names:
the core pairs the n-th call of an operation on every rank, and plans the sequences of calls that recur."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from horoplug._native import ANY_RANK, DirectAllreduce, Error, Op
from horoplug.common import dtypes
from horoplug.torch.adapter import ADAPTER, CODES
from horoplug.torch.c10d import bitwise, profiling, sparse
from horoplug.torch.c10d.arguments import check_list, check_whole, row_splits
from horoplug.torch.c10d.calls import TAKES_NONE, Calls
from horoplug.torch.c10d.monitored_barrier import monitored_barrier
from horoplug.torch.c10d.operations import Submitted
from horoplug.torch.c10d.reductions import SUM, Reduction, of_core_by_hash, reduction_of
from horoplug.torch.plain import is_plain

_ALLREDUCE = int(Op.ALLREDUCE)


def _on_its_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that is passed on to another backend if the group has one for the device of the tensors."""

    @functools.wraps(method)
    def operation(self: ProcessGroup, *args: Any, **options: Any) -> Any:
        tensor = next(_tensors(args), None)
        other = None if tensor is None else self._other(tensor)
        if other is None:
            return method(self, *args, **options)
        return getattr(other, method.__name__)(*args, **options)

    return operation


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


class ProcessGroup(Calls):
    """A process group whose operations run in an engine of horoplug.

    Methods have the signatures of ``torch.distributed.ProcessGroup``: ranks are those of the group; options that are
    None stand for the defaults. They raise ValueError for mistakes of this rank, and DistBackendError if the operation
    fails."""

    # ---- collective operations -------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        (tensor,) = tensors = _listed(tensors)
        if self._is_blocking(opts) and self._allreduce_at_once(tensor, opts):
            return None
        if (other := self._other(tensor)) is not None:
            return other.allreduce(tensors, opts)
        if tensor.is_sparse:
            return sparse.allreduce(self, tensor, _reduction(opts), opts)
        reduction = _reduction(opts)
        if reduction.bitwise is not None:
            return bitwise.allreduce(self, tensors, reduction.bitwise, opts)
        return self._in_place(Op.ALLREDUCE, tensors, opts, reduction=reduction)

    def _allreduce_at_once(self, tensor: torch.Tensor, opts: Any) -> bool:
        """The shortest path to the core in Python, for the call whose latency matters most: a blocking allreduce of one
        dense tensor in host memory. Returns whether it was one. :data:`_in_c` is a shorter one for most of them."""
        code = CODES.get(tensor.dtype, dtypes.BOOL)
        if (
            code == dtypes.BOOL
            or not tensor.is_cpu
            or self._delegates.for_cpu
            or not is_plain(tensor)
            or profiling.is_on()
        ):
            return False
        reduction = reduction_of(opts.reduceOp)
        if reduction.bitwise is not None:
            return False
        address = tensor.data_ptr()
        arguments = ((address, address, (tensor.numel(),)),)
        try:
            handle = self._engine.perform(
                _ALLREDUCE,
                code,
                arguments,
                self._operations.name_in_callback(Op.ALLREDUCE),
                reduction.op,
                0,
                reduction.prescale,
                keep=False,
            )
        except Error as error:
            self._fail_operation(error)
        except BaseException:  # KeyboardInterrupt: the operation may still use the tensor
            self._interrupted.append(tensor)
            raise
        if handle:
            self._await_allreduce(tensor, handle, opts)
        return True

    def _fail_operation(self, error: Error) -> NoReturn:
        raise self._operations.exception(error) from None

    def _await_allreduce(self, tensor: torch.Tensor, handle: int, opts: Any) -> None:
        """Wait for an operation that was not done at once."""
        self._track(Op.ALLREDUCE, (), [Submitted(handle, -1, 0)], tensor, (), None, opts)

    @_on_its_device
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        reduction = _reduction(opts)
        if reduction.bitwise is not None:
            return bitwise.allreduce(self, tensors, reduction.bitwise, opts)
        return self._in_place(Op.ALLREDUCE, tensors, opts, reduction=reduction)

    @_on_its_device
    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _listed(tensors)
        # In one of PyTorch's overloads, the root is given in place of options.
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        return self._in_place(Op.BROADCAST, tensors, opts, root=root)

    @_on_its_device
    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _listed(tensors)
        reduction, root = _reduction(opts), getattr(opts, "rootRank", 0)
        if reduction.bitwise is not None:
            return bitwise.reduce(self, tensors, reduction.bitwise, root, opts)
        return self._in_place(Op.REDUCE, tensors, opts, reduction=reduction, root=root)

    @_on_its_device
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        ((output,), (tensor,)) = outputs, inputs
        check_list(self._size, "all_gather", output, tensor)
        return self._rows(Op.ALLGATHER, [(tensor, output)], opts)

    @_on_its_device
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """``outputs``: for each rank, the list of its tensors."""
        pairs = [(tensor, [of[i] for of in outputs]) for i, tensor in enumerate(inputs)]
        for tensor, output in pairs:
            check_list(self._size, "all_gather_coalesced", output, tensor)
        return self._rows(Op.ALLGATHER, pairs, opts)

    @_on_its_device
    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self._all_gather([(tensor, output)], opts)

    _allgather_base = all_gather_single

    @_on_its_device
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._all_gather(list(zip(inputs, outputs, strict=True)), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, pairs: Sequence[Any], opts: Any) -> Any:
        for tensor, output in pairs:
            check_whole(self._size, "all_gather_into_tensor", output, tensor)
        return self._rows(Op.ALLGATHER, pairs, opts)

    @_on_its_device
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (output,), (tensors,) = outputs, inputs
        check_list(self._size, "reduce_scatter", tensors, output)
        return self._reduce_scatter([(_joined(tensors), output)], opts)

    @_on_its_device
    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self._reduce_scatter([(tensor, output)], opts)

    _reduce_scatter_base = reduce_scatter_single

    @_on_its_device
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._reduce_scatter(list(zip(inputs, outputs, strict=True)), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, pairs: Sequence[Any], opts: Any) -> Any:
        for tensor, output in pairs:
            check_whole(self._size, "reduce_scatter_tensor", tensor, output)
        reduction = _reduction(opts)
        if reduction.bitwise is not None:
            return bitwise.reduce_scatter(self, pairs, reduction.bitwise, opts)
        if reduction.scatters:
            return self._rows(Op.REDUCESCATTER, pairs, opts, reduction=reduction)
        # The core reduces and scatters only sums and averages.
        whole = [
            tensor.detach().clone(memory_format=torch.contiguous_format) for tensor, _ in pairs
        ]
        submitted = [
            self._submit(Op.ALLREDUCE, [each], outputs=True, reduction=reduction)[0]
            for each in whole
        ]

        def finish() -> None:
            for each, (_, output) in zip(whole, pairs, strict=True):
                output.copy_(each.view(self._size, -1)[self._rank].view(output.shape))

        return self._track(
            Op.REDUCESCATTER, whole, submitted, whole, [output for _, output in pairs], finish, opts
        )

    @_on_its_device
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (tensor,) = inputs
        root = opts.rootRank
        output = outputs[0] if self._rank == root else []
        if self._rank == root:
            check_list(self._size, "gather", output, tensor)
        return self._rows(Op.GATHER, [(tensor, output)], opts, root=root)

    @_on_its_device
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (output,) = outputs
        root = opts.rootRank
        tensor = output.new_empty(0)
        if self._rank == root:
            check_list(self._size, "scatter", inputs[0], output)
            tensor = _joined(inputs[0])
        return self._rows(Op.SCATTER, [(tensor, output)], opts, root=root)

    @_on_its_device
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for tensors in (outputs, inputs):
            if len(tensors) != self._size:
                raise ValueError(
                    f"all_to_all takes one tensor for each of the {self._size} ranks, got {len(tensors)}"
                )
        splits = [tensor.numel() for tensor in inputs]
        return self._rows(
            Op.ALLTOALL,
            [(_joined(inputs), outputs)],
            opts,
            splits=splits,
            expected=[tensor.numel() for tensor in outputs],
        )

    @_on_its_device
    def all_to_all_single(
        self, output: Any, tensor: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        splits = row_splits(self._size, "input", tensor, input_splits)
        expected = row_splits(self._size, "output", output, output_splits)
        return self._rows(
            Op.ALLTOALL, [(tensor, output)], opts, splits=splits, expected=expected, by_rows=True
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        name = self._operations.name_in_callback(Op.BARRIER)
        handle = self._accepted(lambda: self._engine.submit(Op.BARRIER, 0, (), name))
        return self._track(Op.BARRIER, (), [Submitted(handle, -1, 0)], None, [], None, opts)

    # ---- between two ranks -----------------------------------------------------------------------------------------

    @_on_its_device
    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        submitted, dense = self._submit(Op.SEND, [tensor], root=destination, tag=tag)
        return self._track(Op.SEND, tensors, [submitted], dense, tensors, None, None)

    @_on_its_device
    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        submitted, dense = self._submit(Op.RECV, [tensor], outputs=True, root=source, tag=tag)
        finish = self._copies_back(dense, tensors)
        title = "recvAnySource" if source == ANY_RANK else None
        return self._track(Op.RECV, tensors, [submitted], dense, tensors, finish, None, title)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """``Work._source_rank()`` gives the sender."""
        return self.recv(tensors, ANY_RANK, tag)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names the ranks that do not reach it within ``timeout``: see :mod:`.monitored_barrier`."""
        if isinstance(timeout, float):  # PyTorch 2.1 passes on seconds
            timeout = timedelta(seconds=timeout)
        monitored_barrier(self, self._timeout if timeout is None else timeout, wait_all_ranks)

    # ---- the deprecated style of coalescing: calls between these two are waited for together ------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []
        self._allow_direct_calls()

    def _end_coalescing(self, device: Any = None) -> Any:
        works, self._coalesced = self._coalesced or [], None
        self._allow_direct_calls()
        submitted = [each for work in works for each in work._submitted]
        finishes = [work._finish for work in works if work._finish is not None]

        def finish() -> None:
            for each in finishes:
                each()

        outputs = [tensor for work in works for tensor in work._outputs]
        return self._track(Op.SEND, (), submitted, works, outputs, finish, None)


def _in_c(method: Any) -> Any:
    """The same method, of which usual calls go to the core without Python."""
    how, reductions = ADAPTER.direct, of_core_by_hash()
    if how is None or not TAKES_NONE:
        return method
    direct = DirectAllreduce(
        method, how.tensor_type, how.exchange, dist.AllreduceOptions, reductions, profiling.is_on
    )
    return functools.update_wrapper(direct, method)


ProcessGroup.allreduce = _in_c(ProcessGroup.allreduce)  # type: ignore[method-assign]


def _listed(tensors: Any) -> list[torch.Tensor]:
    """PyTorch's C++ API passes one tensor in place of a list in some places."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _reduction(opts: Any) -> Reduction:
    """``opts``: options, or a reduction, as in one of PyTorch's overloads."""
    return SUM if opts is None else reduction_of(getattr(opts, "reduceOp", opts))


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
