"""How a call of ``torch.distributed`` becomes operations of the core, and their results those of the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from horoplug._native import Error, Op, Result
from horoplug.common import dtypes
from horoplug.torch import streams
from horoplug.torch.adapter import TorchAdapter
from horoplug.torch.c10d import profiling
from horoplug.torch.c10d.group import Group
from horoplug.torch.c10d.operations import PYTORCH, Submitted
from horoplug.torch.c10d.reductions import SUM, Reduction
from horoplug.torch.c10d.work import Work
from horoplug.torch.plain import is_plain

Finish = Callable[[], None]


class _Adapter(TorchAdapter):
    for_sparse = "use .to_dense(); only all_reduce takes sparse tensors"
    for_shared_elements = "pass a copy (.contiguous())"


ADAPTER = _Adapter()

# Before 2.8, torch.distributed calls wait() of what a blocking call returns.
TAKES_NONE = PYTORCH >= (2, 8)

_POINT_TO_POINT = (Op.SEND, Op.RECV)
_CONCATENATING = (Op.ALLGATHER, Op.GATHER)
_REDUCING = (Op.ALLREDUCE, Op.REDUCE, Op.REDUCESCATTER)
_ZERO = timedelta(0)


class Calls(Group):
    """A group with what its operations have in common."""

    def _other(self, tensor: torch.Tensor) -> Any:
        """The backend that the group has for the device of ``tensor``; None: this one."""
        return (
            None
            if tensor.is_cpu and not self._delegates.for_cpu
            else self._delegate(tensor.device.type)
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
        layout: str | None = None,
    ) -> tuple[Submitted, list[torch.Tensor]]:
        """Submit one operation on tensors of one dtype. ``outputs``: they are overwritten. ``by_rows``: the operation
        moves rows; otherwise tensors of the same number of elements fit, whatever their shapes. ``blocking``: the
        caller waits next, so the core may do so already. ``target``: the address of a tensor that gets the result.
        ``layout``: see ``Engine.submit``.

        Returns what was submitted, and the dense tensors that the core uses."""
        reduction = reduction or SUM
        described = [ADAPTER.describe(tensor, outputs) for tensor in tensors]
        code, device = described[0][1], described[0][4]
        # One row, where ranks may give several, so that ranks with other numbers of elements are told.
        row = (1,) if op in _CONCATENATING else ()
        arguments = [
            (address, address if outputs else target, shape if by_rows else (*row, dense.numel()))
            for dense, _, address, shape, _ in described
        ]
        stream = 0 if device < 0 else streams.current(device)
        if code == dtypes.BOOL and op in _REDUCING:
            reduction.check_bool()

        start = self._engine.perform if blocking else self._engine.submit
        point_to_point = op in _POINT_TO_POINT
        name = None if point_to_point else self._operations.name_in_callback(op)

        def submit() -> int:
            return start(
                op,
                code,
                arguments,
                name,
                reduction.op,
                root,
                reduction.prescale,
                1.0,
                splits,
                0,
                0,
                tag,
                layout,
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
        blocking = self._is_blocking(opts) and len(parts) == 1
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
        blocking = self._is_blocking(opts) and len(pairs) == 1
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
            or not is_plain(output)
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

    def _result(self, submitted: Submitted, index: int = 0) -> Result:
        stream = streams.current(submitted.device) if submitted.device >= 0 else 0
        return self._engine.result(submitted.handle, index, stream)

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
        single = isinstance(output, torch.Tensor)
        room = output.numel() if single else sum(tensor.numel() for tensor in output)
        if room and room != memory.nbytes // dense.element_size():
            raise dist.DistBackendError(
                f"{self._who}: ranks disagree about the size of a tensor: by rank, they gave {list(result.row_counts)} "
                f"elements, and this rank expects {room} in all (pass tensors of the same size on every rank)"
            )
        if single:
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
        event = profiling.record(self.own_names[-1], op, inputs, title)

        def work() -> Work:
            kept = (tensors, outputs)
            collective = op not in _POINT_TO_POINT
            made = Work(self._operations, submitted, kept, outputs, finish, collective, event, op)
            if (limit := _own_limit(opts)) is not None:
                made.limit_to(limit)
            return made

        if self._coalesced is not None:
            self._coalesced.append(made := work())
            return made
        if event is not None or not self._is_blocking(opts):
            return self._operations.track(work())
        try:
            failure = self._operations.finish(submitted, finish)
        except BaseException:  # KeyboardInterrupt: the operations still use the tensors
            self._operations.track(work())
            raise
        if failure is not None:
            raise failure
        return None

    def _is_blocking(self, opts: Any) -> bool:
        """Whether the caller of the operation waits for its end and needs no ``Work``."""
        return (
            TAKES_NONE
            and not getattr(opts, "asyncOp", True)
            and self._coalesced is None
            and _own_limit(opts) is None
        )

    def gather_rows(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        then: Callable[[list[torch.Tensor]], None],
        layout: str,
        opts: Any,
    ) -> Any:
        """Concatenate each of ``tensors`` of all ranks along the first dimension, whose size may differ between ranks,
        and pass the results to ``then``, which writes ``outputs``. The tensors have one dtype. ``layout``: what they
        are for, in words, which is the same on all ranks."""
        submitted, kept = self._submit(Op.ALLGATHER, tensors, by_rows=True, layout=layout)

        def finish() -> None:
            results = []
            for index, dense in enumerate(kept):
                result = self._result(submitted, index)
                shape = (result.rows, *dense.shape[1:])
                results.append(ADAPTER.from_memory(result.memory, dense, shape))
            then(results)

        return self._track(Op.ALLGATHER, tensors, [submitted], kept, outputs, finish, opts)


def _own_limit(opts: Any) -> timedelta | None:
    """The time limit that a call has for itself; None: that of the group, which PyTorch gives as a negative one."""
    limit: timedelta = getattr(opts, "timeout", _ZERO)
    return limit if limit > _ZERO else None
