"""``broadcast_object`` and ``allgather_object``: Python objects as pickled bytes.

Unpickling data executes code, so the bytes are authenticated first (object_tags.py)."""

import contextlib
import pickle
import threading
from typing import Any

from horoplug.common.byte_transfer import allgather_bytes, broadcast_bytes
from horoplug.common.context import context
from horoplug.common.object_tags import HEADER_BYTES, ObjectOperation, ObjectTags, check
from horoplug.common.opspec import Call
from horoplug.common.process_sets import (
    ProcessSet,
    global_process_set,
    process_set_by_id,
    process_set_id,
)

try:  # also pickles functions and classes of the main script
    from cloudpickle import dumps
except ImportError:
    from pickle import dumps

_TAGS = "object tags"  # key in context.per_job


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank` (a global rank) on every rank of the set. Other ranks' ``obj`` is ignored.
    The object must be picklable. ``name`` pairs the calls of the ranks; unnamed calls are paired in order.

    Raises NotInitializedError before ``init``, ValueError for a process set that is not registered or does not contain
    this rank, and HorovodInternalError if the ranks disagree, a rank has failed, or the object was changed on its
    way."""
    connections = context.connections()
    is_root = connections.rank == root_rank
    set_id = process_set_id(process_set)
    operation = ObjectOperation("broadcast", set_id, str(name) if name else None)
    data = bytearray(dumps(obj) if is_root else b"")
    tags = _tags()
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
    """Return the objects of all ranks of the set, in rank order. They must be picklable. A joined rank contributes no
    object. ``name`` pairs the calls of the ranks; unnamed calls are paired in order.

    Raises the exceptions of :func:`broadcast_object`."""
    set_id = process_set_id(process_set)
    operation = ObjectOperation("allgather", set_id, str(name) if name else None)
    data = dumps(obj)
    tags = _tags()
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


def _tags() -> ObjectTags:
    """This rank's object tags in the current generation."""
    found = context.per_job.get(_TAGS)
    if found is None:
        connections = context.connections()
        made = ObjectTags(connections.object_key, connections.rank, connections.size)
        found = context.per_job.setdefault(_TAGS, made)
    assert isinstance(found, ObjectTags)
    return found


_NAMED = contextlib.nullcontext()


def _in_order(operation: ObjectOperation) -> contextlib.AbstractContextManager[Any]:
    """A context that runs operations without a name one after the other. Receivers require growing numbers, and the
    core pairs the n-th unnamed operation of one rank with the n-th of every other rank."""
    if operation.name:
        return _NAMED
    lock = context.per_job.get(operation)
    if lock is None:
        lock = context.per_job.setdefault(operation, threading.Lock())
    assert isinstance(lock, contextlib.AbstractContextManager)
    return lock
