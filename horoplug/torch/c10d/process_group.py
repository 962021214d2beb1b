"""The process group of the backend "horoplug" of ``torch.distributed``.

Every group has an engine of its own, so that groups neither wait for nor fail with each other. A call of
``torch.distributed`` becomes one submission to the engine, as in :mod:`horoplug.common.ops`. The calls have no names:
the core pairs the n-th call of an operation on every rank, and plans the sequences of calls that recur."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from horoplug._native import ANY_RANK, Error, Op, Result
from horoplug.common import dtypes
from horoplug.rendezvous.network.fork import close_in_children
from horoplug.torch import streams
from horoplug.torch.adapter import ADAPTER, CODES
from horoplug.torch.c10d import bitwise, profiling, sparse
from horoplug.torch.c10d.connect import connect
from horoplug.torch.c10d.delegates import Delegates
from horoplug.torch.c10d.monitored_barrier import monitored_barrier
from horoplug.torch.c10d.reductions import Reduction, reduction_of
from horoplug.torch.c10d.work import Operations, Submitted, Work

Finish = Callable[[], None]

_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
_registered_in = -1  # process id


# PyTorch's stubs describe the C++ class, whose methods take less and never return None.
_Base: Any = dist.ProcessGroup


class ProcessGroup(_Base):  # type: ignore[misc]
    """A process group whose operations run in an engine of horoplug.

    Methods have the signatures of ``torch.distributed.ProcessGroup``: ranks are those of the group; options that are
    None stand for the defaults. They raise ValueError for mistakes of this rank, and DistBackendError if the operation
    fails."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()
    ) -> None:
        """Connect with the other ranks of the group. Collective over the group.

        ``store``: a store for this group alone. ``ranks``: the ranks of the members in the default group; empty: this
        is the default group."""
        super().__init__(rank, size)  # the only constructor that subclasses in Python can use
        self._rank, self._size = rank, size
        self._store = store
        self._timeout = timeout
        self._ranks = list(ranks) or list(range(size))
        where = f" of the group of ranks {self._ranks}" if ranks and len(ranks) > 1 else ""
        self._who = f"rank {rank}{where}"
        self._delegates = Delegates(store, rank, size, timeout, self.own_names)
        self._coalesced: list[Work] | None = None
        self._interrupted: list[torch.Tensor] = []
        self._name_of_group = self._description = ""
        self._engine, self._connections = connect(store, rank, size, timeout)
        self._streams = [(fd, os.fstat(fd)) for fd in self._connections.streams]
        self._operations = Operations(self._engine, self._who, self)
        self._pid = os.getpid()
        close_in_children(self)
        _open.add(self)
        _shut_down_at_exit()

    own_names: tuple[str, ...] = ("horoplug",)
    """The names of backends that mean this class. The last one is shown in profiles."""

    # ---- what torch.distributed asks a group for -----------------------------------------------------------------

    def getBackendName(self) -> str:
        return "horoplug"

    name = getBackendName

    # A group in Python has to keep its name and description itself; C++ code asks by the camel-case methods.

    def _set_group_name(self, name: str) -> None:
        self._name_of_group = name

    @property
    def group_name(self) -> str:
        return self._name_of_group

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        return self._description

    def setGroupName(self, name: str) -> None:
        self._name_of_group = name

    def getGroupName(self) -> str:
        return self._name_of_group

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def __repr__(self) -> str:
        return f"<horoplug process group: {self._who}, size {self._size}>"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> Any:
        return self._delegates.find(self, torch.device(device).type) or self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_sequence_number_for_group(self) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group; operations in flight fail on all ranks. Idempotent."""
        if self not in _open or self._pid != os.getpid():
            return
        _open.discard(self)
        self._engine.shutdown()
        self._connections.close()
        self._operations.close()
        self._delegates.shutdown()

    def abort(self) -> None:
        """End the group on all ranks at once."""
        if self in _open and self._pid == os.getpid():
            with contextlib.suppress(Error):
                self._engine.abort("abort() was called")
        self.shutdown()

    def forget(self) -> None:
        """See :class:`horoplug.rendezvous.network.fork.OwnsDescriptors`."""
        for fd, stat in self._streams:
            with contextlib.suppress(OSError):  # the engine has closed it
                if os.path.samestat(os.fstat(fd), stat):
                    os.close(fd)

    # ---- collective operations -------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        (tensor,) = tensors = _listed(tensors)
        if self._blocks(opts) and self._allreduce_at_once(tensor, opts):
            return None
        if tensor.is_sparse:
            return sparse.allreduce(self, tensor, _reduction(opts))
        reduction = _reduction(opts)
        if reduction.bitwise is not None:
            return bitwise.allreduce(self, tensors, reduction.bitwise)
        if other := self._other(tensor):
            return other.allreduce(tensors, opts)
        return self._in_place(Op.ALLREDUCE, tensors, opts, reduction=reduction)

    def _allreduce_at_once(self, tensor: torch.Tensor, opts: Any) -> bool:
        """The shortest path to the core, for the call whose latency matters most: a blocking allreduce of one dense
        tensor in host memory. Returns whether it was one."""
        code = CODES.get(tensor.dtype, dtypes.BOOL)
        if (
            code == dtypes.BOOL
            or not tensor.is_cpu
            or self._delegates.for_cpu
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or tensor.is_neg()
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
                _ALLREDUCE, code, arguments, None, reduction.op, 0, reduction.prescale, keep=False
            )
        except Error as error:
            raise self._operations.exception(error) from None
        except BaseException:  # KeyboardInterrupt: the operation may still use the tensor
            self._interrupted.append(tensor)
            raise
        if handle:
            self._track(Op.ALLREDUCE, (), [Submitted(handle, -1, 0)], tensor, (), None, opts)
        return True

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        reduction = _reduction(opts)
        if reduction.bitwise is not None:
            return bitwise.allreduce(self, tensors, reduction.bitwise)
        if other := self._other(tensors[0]):
            return other.allreduce_coalesced(tensors, opts)
        return self._in_place(Op.ALLREDUCE, tensors, opts, reduction=reduction)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _listed(tensors)
        if other := self._other(tensors[0]):
            return other.broadcast(tensors, opts)
        return self._in_place(Op.BROADCAST, tensors, opts, root=getattr(opts, "rootRank", 0))

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _listed(tensors)
        if other := self._other(tensors[0]):
            return other.reduce(tensors, opts)
        reduction, root = _reduction(opts), getattr(opts, "rootRank", 0)
        if reduction.bitwise is not None:
            return bitwise.reduce(self, tensors, reduction.bitwise, root)
        return self._in_place(Op.REDUCE, tensors, opts, reduction=reduction, root=root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        ((output,), (tensor,)) = outputs, inputs
        if other := self._other(tensor):
            return other.allgather(outputs, inputs, opts)
        self._check_list("all_gather", output, tensor)
        return self._rows(Op.ALLGATHER, [(tensor, output)], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """``outputs``: for each rank, the list of its tensors."""
        if other := self._other(inputs[0]):
            return other.allgather_coalesced(outputs, inputs, opts)
        pairs = [(tensor, [of[i] for of in outputs]) for i, tensor in enumerate(inputs)]
        for tensor, output in pairs:
            self._check_list("all_gather_coalesced", output, tensor)
        return self._rows(Op.ALLGATHER, pairs, opts)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if other := self._other(tensor):
            return other._allgather_base(output, tensor, opts)
        self._check_whole("all_gather_into_tensor", output, tensor)
        return self._rows(Op.ALLGATHER, [(tensor, output)], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if other := self._other(inputs[0]):
            return other.allgather_into_tensor_coalesced(outputs, inputs, opts)
        pairs = list(zip(inputs, outputs, strict=True))
        for tensor, output in pairs:
            self._check_whole("all_gather_into_tensor", output, tensor)
        return self._rows(Op.ALLGATHER, pairs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (output,), (tensors,) = outputs, inputs
        if other := self._other(output):
            return other.reduce_scatter(outputs, inputs, opts)
        self._check_list("reduce_scatter", tensors, output)
        return self._reduce_scatter([(_joined(tensors), output)], opts)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if other := self._other(output):
            return other._reduce_scatter_base(output, tensor, opts)
        self._check_whole("reduce_scatter_tensor", tensor, output)
        return self._reduce_scatter([(tensor, output)], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if other := self._other(inputs[0]):
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        pairs = list(zip(inputs, outputs, strict=True))
        for tensor, output in pairs:
            self._check_whole("reduce_scatter_tensor", tensor, output)
        return self._reduce_scatter(pairs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, pairs: Sequence[Any], opts: Any) -> Any:
        reduction = _reduction(opts)
        if reduction.bitwise is not None:
            return bitwise.reduce_scatter(self, pairs, reduction.bitwise)
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

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (tensor,) = inputs
        root = opts.rootRank
        if other := self._other(tensor):
            return other.gather(outputs, inputs, opts)
        output = outputs[0] if self._rank == root else []
        if self._rank == root:
            self._check_list("gather", output, tensor)
        return self._rows(Op.GATHER, [(tensor, output)], opts, root=root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (output,) = outputs
        root = opts.rootRank
        if other := self._other(output):
            return other.scatter(outputs, inputs, opts)
        tensor = output.new_empty(0)
        if self._rank == root:
            self._check_list("scatter", inputs[0], output)
            tensor = _joined(inputs[0])
        return self._rows(Op.SCATTER, [(tensor, output)], opts, root=root)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if other := self._other(inputs[0]):
            return other.alltoall(outputs, inputs, opts)
        for tensors in (outputs, inputs):
            if len(tensors) != self._size:
                raise ValueError(
                    f"all_to_all takes one tensor for each of the {self._size} ranks, got {len(tensors)}."
                )
        splits = [tensor.numel() for tensor in inputs]
        return self._rows(
            Op.ALLTOALL,
            [(_joined(inputs), outputs)],
            opts,
            splits=splits,
            expected=[tensor.numel() for tensor in outputs],
        )

    def all_to_all_single(
        self, output: Any, tensor: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        if other := self._other(tensor):
            return other.alltoall_base(output, tensor, output_splits, input_splits, opts)
        splits = self._splits("input", tensor, input_splits)
        expected = self._splits("output", output, output_splits)
        return self._rows(
            Op.ALLTOALL, [(tensor, output)], opts, splits=splits, expected=expected, by_rows=True
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        handle = self._accepted(lambda: self._engine.submit(Op.BARRIER, 0, ()))
        return self._track(Op.BARRIER, (), [Submitted(handle, -1, 0)], None, [], None, opts)

    # ---- between two ranks -----------------------------------------------------------------------------------------

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        if other := self._other(tensor):
            return other.send(tensors, destination, tag)
        submitted, dense = self._submit(Op.SEND, [tensor], root=destination, tag=tag)
        return self._track(Op.SEND, tensors, [submitted], dense, tensors, None, None)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        if other := self._other(tensor):
            return other.recv(tensors, source, tag)
        submitted, dense = self._submit(Op.RECV, [tensor], outputs=True, root=source, tag=tag)
        finish = self._copies_back(dense, tensors)
        title = "recvAnySource" if source == ANY_RANK else None
        return self._track(Op.RECV, tensors, [submitted], dense, tensors, finish, None, title)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """``Work._source_rank()`` gives the sender."""
        return self.recv(tensors, ANY_RANK, tag)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names the ranks that do not reach it within ``timeout``: see :mod:`.monitored_barrier`."""
        monitored_barrier(self, self._timeout if timeout is None else timeout, wait_all_ranks)

    # ---- the deprecated style of coalescing: calls between these two are waited for together ------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Any:
        works, self._coalesced = self._coalesced or [], None
        submitted = [each for work in works for each in work._submitted]
        finishes = [work._finish for work in works if work._finish is not None]

        def finish() -> None:
            for each in finishes:
                each()

        outputs = [tensor for work in works for tensor in work._outputs]
        return self._track(Op.SEND, (), submitted, works, outputs, finish, None)

    # ---- for the reductions that the core does not have ------------------------------------------------------------

    def gather_rows(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        then: Callable[[list[torch.Tensor]], None],
    ) -> Any:
        """Concatenate each of ``tensors`` of all ranks along the first dimension, whose size may differ between ranks,
        and pass the results to ``then``, which writes ``outputs``."""
        submitted, kept = [], []
        for tensor in tensors:
            each, dense = self._submit(Op.ALLGATHER, [tensor], by_rows=True)
            submitted.append(each)
            kept.append(dense[0])

        def finish() -> None:
            results = []
            for each, dense in zip(submitted, kept, strict=True):
                result = self._result(each)
                shape = (result.rows, *dense.shape[1:])
                results.append(ADAPTER.from_memory(result.memory, dense, shape))
            then(results)

        return self._track(Op.ALLGATHER, tensors, submitted, kept, outputs, finish, None)

    # ---- checks of arguments ---------------------------------------------------------------------------------------

    def _check_list(self, name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
        if len(tensors) != self._size:
            raise ValueError(
                f"{name} takes a list of one tensor for each of the {self._size} ranks, got {len(tensors)}."
            )
        for index, tensor in enumerate(tensors):
            if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
                raise ValueError(
                    f"{name}: tensor {index} of the list is {tensor.dtype} of shape {list(tensor.shape)}, but the "
                    f"other tensor is {like.dtype} of shape {list(like.shape)}; they must have the same size."
                )

    def _check_whole(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.dtype != part.dtype:
            raise ValueError(
                f"{name}: the tensors have different dtypes: {whole.dtype}, {part.dtype}."
            )
        if whole.numel() != part.numel() * self._size:
            raise ValueError(
                f"{name}: the larger tensor must have {self._size} times (the size of the group) the elements of the "
                f"other one, but they have shapes {list(whole.shape)} and {list(part.shape)}."
            )

    def _splits(self, which: str, tensor: torch.Tensor, splits: Any) -> list[int]:
        rows = tensor.shape[0] if tensor.ndim else 1
        if not splits:
            if rows % self._size:
                raise ValueError(
                    f"all_to_all_single without {which}_split_sizes divides the first dimension of the {which} evenly, "
                    f"but {rows} rows are not divisible by {self._size} ranks."
                )
            return [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"all_to_all_single: {which}_split_sizes takes one number for each of the {self._size} ranks, which "
                f"add up to the first dimension, {rows}; got {list(splits)}."
            )
        return list(splits)

    # ---- submitting ------------------------------------------------------------------------------------------------

    def _other(self, tensor: torch.Tensor) -> Any:
        """The backend that the group has for the device of ``tensor``; None: this one."""
        return (
            None
            if tensor.is_cpu and not self._delegates.for_cpu
            else self._delegates.find(self, tensor.device.type)
        )

    def _submit(
        self,
        op: Op,
        tensors: Sequence[torch.Tensor],
        *,
        outputs: bool = False,
        reduction: Reduction | None = None,
        root: int = 0,
        splits: Sequence[int] | None = None,
        tag: int = 0,
        by_rows: bool = False,
        blocking: bool = False,
        target: int = 0,
    ) -> tuple[Submitted, list[torch.Tensor]]:
        """Submit one operation on tensors of one dtype. ``outputs``: they are overwritten. ``by_rows``: the operation
        moves rows; otherwise tensors of the same number of elements fit, whatever their shapes. ``blocking``: the
        caller waits next, so the core may do so already. ``target``: the address of a tensor that gets the result.

        Returns what was submitted, and the dense tensors that the core uses."""
        reduction = reduction or _SUM
        described = [ADAPTER.describe(tensor, outputs) for tensor in tensors]
        code, device = described[0][1], described[0][4]
        arguments = [
            (address, address if outputs else target, shape if by_rows else (dense.numel(),))
            for dense, _, address, shape, _ in described
        ]
        stream = 0 if device < 0 else streams.current(device)
        if code == dtypes.BOOL and op in _REDUCING:
            reduction.check_bool()

        start = self._engine.perform if blocking else self._engine.submit

        def submit() -> int:
            return start(
                op,
                code,
                arguments,
                None,
                reduction.op,
                root,
                reduction.prescale,
                1.0,
                splits,
                0,
                0,
                tag,
                device,
                stream,
            )

        return Submitted(self._accepted(submit), device, stream), [each[0] for each in described]

    def _accepted(self, submit: Callable[[], int]) -> int:
        try:
            return submit()
        except Error as error:
            raise self._operations.exception(error) from None

    def _in_place(
        self,
        op: Op,
        tensors: Sequence[torch.Tensor],
        opts: Any,
        reduction: Reduction | None = None,
        root: int = 0,
    ) -> Any:
        """An operation that overwrites its tensors; one submission for the tensors of each dtype."""
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(tensor.dtype, []).append(tensor)
        many = op is Op.ALLREDUCE
        parts = [
            part
            for group in groups.values()
            for part in ([group] if many else [[t] for t in group])
        ]
        blocking = self._blocks(opts) and len(parts) == 1
        submitted, kept, finishes = [], [], []
        for part in parts:
            each, dense = self._submit(
                op, part, outputs=True, reduction=reduction, root=root, blocking=blocking
            )
            submitted.append(each)
            kept.append(dense)
            if (finish := self._copies_back(dense, part)) is not None:
                finishes.append(finish)

        def finish_all() -> None:
            for finish in finishes:
                finish()

        return self._track(
            op, tensors, submitted, kept, tensors, finish_all if finishes else None, opts
        )

    @staticmethod
    def _copies_back(
        dense: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> Finish | None:
        pairs = [(d, t) for d, t in zip(dense, tensors, strict=True) if d is not t]
        if not pairs:
            return None

        def finish() -> None:
            for copy, tensor in pairs:
                ADAPTER.copy_back(copy, tensor)

        return finish

    def _rows(
        self,
        op: Op,
        pairs: Sequence[tuple[torch.Tensor, Any]],
        opts: Any,
        *,
        expected: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """Operations whose results the core allocates. ``pairs``: input and output; the output is a tensor, or a
        list of tensors that get equal parts. ``expected``: the rows that have to come from each rank."""
        blocking = self._blocks(opts) and len(pairs) == 1
        submitted, kept = [], []
        for tensor, output in pairs:
            each, dense = self._submit(
                op, [tensor], target=self._target(op, tensor, output), blocking=blocking, **options
            )
            submitted.append(each)
            kept.append(dense[0])

        def finish() -> None:
            for each, dense, (_, output) in zip(submitted, kept, pairs, strict=True):
                self._take(each, dense, output, expected)

        outputs = [t for _, out in pairs for t in ([out] if isinstance(out, torch.Tensor) else out)]
        inputs = [tensor for tensor, _ in pairs]
        return self._track(op, inputs, submitted, kept, outputs, finish, opts)

    def _target(self, op: Op, tensor: torch.Tensor, output: Any) -> int:
        """The address at which the core may write the result; 0: it has to allocate memory for it."""
        if (
            op is Op.SCATTER
            or not isinstance(output, torch.Tensor)
            or output.dtype != tensor.dtype
            or output.device != tensor.device
            or not output.is_contiguous()
            or output.is_neg()
        ):
            return 0
        if op is Op.ALLTOALL and output.numel() != tensor.numel():
            return 0
        address = output.data_ptr()
        if output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            # Results are written while inputs are still read. Only the input of an allgather may overlap with the
            # output, as the part of this rank.
            part = tensor.numel() * tensor.element_size() * self._rank
            return address if op is Op.ALLGATHER and tensor.data_ptr() == address + part else 0
        return address

    def _result(self, submitted: Submitted) -> Result:
        stream = streams.current(submitted.device) if submitted.device >= 0 else 0
        return self._engine.result(submitted.handle, 0, stream)

    def _take(
        self, submitted: Submitted, dense: torch.Tensor, output: Any, expected: Sequence[int] | None
    ) -> None:
        """Copy a result of the core to the caller's tensors."""
        result = self._result(submitted)
        if expected is not None and list(result.row_counts) != list(expected):
            raise ValueError(
                f"{self._who}: all_to_all: the ranks send {list(result.row_counts)} rows to this rank, but its outputs "
                f"have room for {list(expected)}"
            )
        memory = result.memory
        if memory is None:  # the result is in the output, or has no elements
            return
        if isinstance(output, torch.Tensor):
            if output.numel():
                source = ADAPTER.from_memory(memory, dense, output.shape)
                output.detach().copy_(source)
            return
        if not output:
            return
        source = ADAPTER.from_memory(memory, dense, (memory.nbytes // dense.element_size(),))
        parts = torch.split(source, [tensor.numel() for tensor in output])
        for tensor, part in zip(output, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    def _track(
        self,
        op: Op,
        inputs: Sequence[torch.Tensor],
        submitted: Sequence[Submitted],
        tensors: Any,
        outputs: Sequence[torch.Tensor],
        finish: Finish | None,
        opts: Any,
        title: str | None = None,
    ) -> Any:
        """Wait for the operations of one call if the caller asks for it, else return their ``Work``. ``inputs``: the
        tensors that the caller gave; ``tensors``: what has to stay alive."""
        shown = profiling.record(self.own_names[-1], op, inputs, title)

        def work() -> Work:
            kept = (tensors, outputs)
            return Work(
                self._operations, submitted, kept, outputs, finish, op not in _PAIRWISE, shown
            )

        if self._coalesced is not None:
            self._coalesced.append(made := work())
            return made
        if shown is not None or not self._blocks(opts):
            return self._operations.track(work())
        try:
            failure = self._operations.finish(submitted, finish)
        except BaseException:  # KeyboardInterrupt: the operations still use the tensors
            self._operations.track(work())
            raise
        if failure is not None:
            raise failure
        return None

    def _blocks(self, opts: Any) -> bool:
        """Whether the caller of the operation waits for its end and needs no ``Work``."""
        return not getattr(opts, "asyncOp", True) and self._coalesced is None


_SUM = Reduction()
_ALLREDUCE = int(Op.ALLREDUCE)
_PAIRWISE = (Op.SEND, Op.RECV)
_REDUCING = (Op.ALLREDUCE, Op.REDUCE, Op.REDUCESCATTER)


def _listed(tensors: Any) -> list[torch.Tensor]:
    """PyTorch's C++ API passes one tensor in place of a list in some places."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _reduction(opts: Any) -> Reduction:
    return _SUM if opts is None else reduction_of(opts.reduceOp)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _shut_down_all() -> None:
    for group in list(_open):
        group.shutdown()


def _shut_down_at_exit() -> None:
    """Let the groups of this process leave in good order when it ends, so that it does not seem to have died."""
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        # Not atexit: processes of multiprocessing end without it.
        multiprocessing.util.Finalize(None, _shut_down_all, exitpriority=0)
