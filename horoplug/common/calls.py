"""The signature of each operation after its tensors: a function that checks the arguments and returns a
:class:`~horoplug.common.opspec.Call`.

The functions are named after the operations, because Python's messages about wrong arguments contain the name. They
raise ValueError or TypeError for arguments that are invalid whatever the other ranks pass."""

from collections.abc import Callable
from typing import Any, Final

from horoplug.common.opspec import Call
from horoplug.common.process_sets import ProcessSet, global_process_set, process_set_id
from horoplug.common.reduce_ops import NAMES, Adasum, Average, Sum, check_ranks, resolve


def allreduce(
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call:
    set_id = process_set_id(process_set)
    reduce_op = resolve(op, average)
    if reduce_op == Adasum:
        check_ranks(reduce_op, process_set.size())
    return Call(name, reduce_op, 0, prescale_factor, postscale_factor, None, set_id)


def allgather(name: str | None = None, process_set: ProcessSet = global_process_set) -> Call:
    return Call(name, process_set=process_set_id(process_set))


def broadcast(
    root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    return Call(name, root=root_rank, process_set=process_set_id(process_set))


def alltoall(
    splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    return Call(name, splits=splits, process_set=process_set_id(process_set))


def reducescatter(
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call:
    if resolve(op) not in (Average, Sum):
        # Horovod raises a RuntimeError where Adasum is not supported, and programs catch it.
        kind = NotImplementedError if op == Adasum else ValueError
        raise kind(f"reducescatter supports op=Average and op=Sum, not {NAMES[op]}")
    set_id = process_set_id(process_set)
    return Call(name, op, 0, prescale_factor, postscale_factor, None, set_id)


def reduce(
    root_rank: int,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call:
    if resolve(op) == Adasum:
        raise NotImplementedError("reduce does not support op=Adasum; use allreduce")
    set_id = process_set_id(process_set)
    return Call(name, op, root_rank, prescale_factor, postscale_factor, None, set_id)


def gather(
    root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    return Call(name, root=root_rank, process_set=process_set_id(process_set))


def scatter(
    root_rank: int,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Call:
    return Call(name, root=root_rank, splits=splits, process_set=process_set_id(process_set))


def send(
    dest: int, tag: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    return Call(name, root=dest, process_set=process_set_id(process_set), tag=tag)


def recv(
    source: int, tag: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    return Call(name, root=source, process_set=process_set_id(process_set), tag=tag)


CALLS: Final[dict[str, Callable[..., Call]]] = {
    function.__name__: function
    for function in (
        allreduce,
        allgather,
        broadcast,
        alltoall,
        reducescatter,
        reduce,
        gather,
        scatter,
        send,
        recv,
    )
}
"""The functions of this module, by the name of the operation."""
