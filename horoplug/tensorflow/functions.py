"""Start from the same state everywhere: variables and objects from one rank to all."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horoplug.common import objects
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.tensorflow.library import as_written
from horoplug.tensorflow.mpi_ops import broadcast_

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


@as_written
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables (of TensorFlow or Keras, in the same order on every rank) with those of rank `root_rank` (a
    global rank), on the ranks of the set. In a graph: returns the operation that does so.

    ``inplace`` is accepted for Horovod's sake: what is received is assigned, in any case."""
    assigned = broadcast_(list(variables), root_rank, "broadcast_variables", process_set)
    return None if tf.executing_eagerly() else tf.group(*assigned)


@as_written
def broadcast_global_variables(root_rank: int) -> Any:
    """Broadcast all variables of a graph of TensorFlow 1: returns the operation that does so.

    Raises RuntimeError in eager mode, where nobody keeps a list of variables."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables is for graphs of TensorFlow 1; use broadcast_variables(model.variables, "
            "root_rank)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all variables when a session of TensorFlow 1 has been created.

    ``device``: where to place the operations."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        graph = tf.compat.v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            with tf.device(self.device or None):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank `root_rank`, on every rank; what other ranks pass is ignored. It must be picklable.

    ``session`` is accepted for Horovod's sake: objects do not pass through a graph."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """:func:`broadcast_object` with everything but the object."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """The objects of all ranks of the set, in the order of the ranks. They must be picklable."""
    return objects.allgather_object(obj, name, process_set)
