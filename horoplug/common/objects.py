"""``broadcast_object`` and ``allgather_object``: Python objects as pickled bytes.

Unpickling data executes code. The bytes come only from ranks of the job, because all connections were authenticated
with the job's secret."""

import pickle
from typing import Any

from horoplug.common.byte_transfer import allgather_bytes, broadcast_bytes
from horoplug.common.context import context
from horoplug.common.opspec import Call
from horoplug.common.process_sets import ProcessSet, global_process_set, process_set_id

try:  # also pickles functions and classes of the main script
    from cloudpickle import dumps
except ImportError:
    from pickle import dumps


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank` (a global rank) on every rank of the set. Other ranks' ``obj`` is ignored.
    The object must be picklable. ``name`` pairs the calls of the ranks; unnamed calls are paired in order.

    Raises NotInitializedError before ``init``, ValueError for a process set that is not registered or does not contain
    this rank, and HorovodInternalError if the ranks disagree or a rank has failed."""
    is_root = context.connections().rank == root_rank
    set_id = process_set_id(process_set)
    data = bytearray(dumps(obj) if is_root else b"")
    length = bytearray(len(data).to_bytes(8, "little"))
    broadcast_bytes(length, Call(name and f"{name}.sz", root=root_rank, process_set=set_id))
    if not is_root:
        data = bytearray(int.from_bytes(length, "little"))
    broadcast_bytes(data, Call(name and f"{name}.t", root=root_rank, process_set=set_id))
    return obj if is_root else pickle.loads(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks of the set, in rank order. They must be picklable. A joined rank contributes no
    object. ``name`` pairs the calls of the ranks; unnamed calls are paired in order.

    Raises the exceptions of :func:`broadcast_object`."""
    call = Call(name, process_set=process_set_id(process_set))
    return [pickle.loads(part) for part in allgather_bytes(dumps(obj), call)]
