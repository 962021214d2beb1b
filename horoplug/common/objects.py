"""``broadcast_object``, ``allgather_object``, ``send_object`` and ``recv_object``: Python objects as pickled bytes.

Unpickling data executes code, so the bytes are authenticated first (object_tags.py)."""

import contextlib
import pickle
import threading
from typing import Any

from horoplug.base.pickling import dumps as dumps
from horoplug.common.byte_transfer import allgather_bytes, broadcast_bytes, recv_bytes, send_bytes
from horoplug.common.context import context
from horoplug.common.object_tags import HEADER_BYTES, ObjectOperation, ObjectTags, check
from horoplug.common.opspec import Call
from horoplug.common.per_job import PerJob
from horoplug.common.process_sets import (
    ProcessSet,
    global_process_set,
    process_set_by_id,
    process_set_id,
)


def _make_tags() -> ObjectTags:
    connections = context.connections()
    return ObjectTags(connections.object_key, connections.rank, connections.size)


_TAGS = PerJob(_make_tags)
"""This rank's object tags."""
_LOCKS: PerJob[dict[tuple[str, ObjectOperation], threading.Lock]] = PerJob(dict)
"""By side (a rank may send to itself) of an operation; see :func:`_lock`."""


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank` (a global rank) on every rank of the set. Other ranks' ``obj`` is ignored.
    The object must be picklable. ``process_set``: by default all ranks of the job. ``name`` pairs the calls of the
    ranks; unnamed calls are paired in order.

    Raises NotInitializedError before ``init``, ValueError for a process set that is not registered or does not contain
    this rank, and HorovodInternalError if the ranks disagree, a rank has failed, or the object was changed on its way.

    Example, on two ranks:

        settings = {"epochs": 3} if hvd.rank() == 0 else None
        hvd.broadcast_object(settings, root_rank=0)  # -> {"epochs": 3}
    """
    connections = context.connections()
    is_root = connections.rank == root_rank
    set_id = process_set_id(process_set)
    operation = ObjectOperation("broadcast", set_id, str(name) if name else None)
    data = bytearray(dumps(obj) if is_root else b"")
    tags = _TAGS.get()
    with _in_order(operation):
        header = bytearray(tags.seal(operation, data) if is_root else HEADER_BYTES)
        broadcast_bytes(header, Call(name and f"{name}.sz", root=root_rank, process_set=set_id))
        if not is_root:
            length, digest = tags.check_header(operation, root_rank, header)
            data = bytearray(length)
        broadcast_bytes(data, Call(name and f"{name}.t", root=root_rank, process_set=set_id))
    if is_root:
        return obj
    check(operation, root_rank, digest, data)
    return pickle.loads(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects (``obj``) of all ranks of the set, in rank order. ``process_set``: by default all ranks of the
    job. They must be picklable. A joined rank contributes no object. ``name`` pairs the calls of the ranks; unnamed
    calls are paired in order.

    Raises the exceptions of :func:`broadcast_object`.

    Example, on two ranks:

        hvd.allgather_object({"rank": hvd.rank()})  # -> [{"rank": 0}, {"rank": 1}]
    """
    set_id = process_set_id(process_set)
    operation = ObjectOperation("allgather", set_id, str(name) if name else None)
    data = dumps(obj)
    tags = _TAGS.get()
    own_rank = context.connections().rank
    with _in_order(operation):
        sent = bytearray(tags.seal(operation, data))
        sent += data
        gathered = allgather_bytes(sent, Call(name, process_set=set_id))
        ranks = process_set_by_id(set_id).ranks or ()
        parts: list[tuple[int, bytes, Any]] = []
        for source, part in zip(ranks, gathered, strict=True):
            if source == own_rank:
                parts.append((source, b"", data))  # this rank's own object, not the received copy
            elif part:
                _, digest = tags.check_header(operation, source, part[:HEADER_BYTES])
                parts.append((source, digest, part[HEADER_BYTES:]))
    objects = []
    for source, digest, part in parts:
        if source != own_rank:
            check(operation, source, digest, part)
        objects.append(pickle.loads(part))
    return objects


def send_object(
    obj: Any, dest: int, tag: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Send an object (``obj``) to rank `dest` (a global rank), where a :func:`recv_object` with the same `tag` returns
    a copy. The object must be picklable. Returns when the other rank has received it. Several objects with one tag
    arrive in the order of the calls. Several threads may call this function, also with the same tag.

    ``process_set``: a send matches only a recv in the same process set; by default the global one. Each object takes
    two messages of its tag, so a tag is either for objects or for the tensors of ``send``.

    Raises NotInitializedError before ``init``, ValueError for an invalid rank or tag and for a process set that is not
    registered or does not contain this rank, and HorovodInternalError if a rank has failed.

    Example, on two ranks:

        if hvd.rank() == 0:
            hvd.send_object({"step": 3}, dest=1, tag=5)
        else:
            request = hvd.recv_object(source=0, tag=5)
            assert request == {"step": 3}
    """
    set_id = process_set_id(process_set)
    data = bytearray(dumps(obj))
    operation = _point_to_point(context.connections().rank, dest, tag, set_id)
    tags, call = _TAGS.get(), Call(None, root=dest, process_set=set_id, tag=tag)
    with _lock("send", operation):
        send_bytes(bytearray(tags.seal(operation, data)), call)
        send_bytes(data, call)


def recv_object(source: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Return the object that rank `source` (a global rank) sends with :func:`send_object` and the same `tag`.
    ``process_set``: a send matches only a recv in the same process set; by default the global one.

    Raises the exceptions of :func:`send_object`, and HorovodInternalError if the object was changed on its way.

    Example, on two ranks:

        if hvd.rank() == 0:
            hvd.send_object({"step": 3}, dest=1, tag=5)
        else:
            request = hvd.recv_object(source=0, tag=5)
            assert request == {"step": 3}
    """
    set_id = process_set_id(process_set)
    operation = _point_to_point(source, context.connections().rank, tag, set_id)
    tags, call = _TAGS.get(), Call(None, root=source, process_set=set_id, tag=tag)
    with _lock("recv", operation):
        header = bytearray(HEADER_BYTES)
        recv_bytes(header, call)
        length, digest = tags.check_header(operation, source, header)
        data = bytearray(length)
        recv_bytes(data, call)
    check(operation, source, digest, data)
    return pickle.loads(data)


def _point_to_point(source: int, dest: int, tag: int, set_id: int) -> ObjectOperation:
    return ObjectOperation("recv", set_id, f"from {source} to {dest} with tag {tag}")


_NAMED = contextlib.nullcontext()


def _in_order(operation: ObjectOperation) -> contextlib.AbstractContextManager[Any]:
    """A context that runs operations without a name one after the other. Receivers require growing numbers, and the
    core pairs the n-th unnamed operation of one rank with the n-th of every other rank."""
    return _NAMED if operation.name else _lock("collective", operation)


def _lock(side: str, operation: ObjectOperation) -> contextlib.AbstractContextManager[Any]:
    return _LOCKS.get().setdefault((side, operation), threading.Lock())
