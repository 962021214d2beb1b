"""Broadcast and allgather of variables and Python objects, such as the initial state of training."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from horoplug.common import objects
from horoplug.common.arguments import shown
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.tensorflow.library import do_not_convert
from horoplug.tensorflow.mpi_ops import broadcast_

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


@do_not_convert
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables with the values that rank `root_rank` (a global rank) has, on all ranks of the set.

    ``variables``: variables of TensorFlow or Keras, in the same order on every rank. In a graph, the result is the
    operation that overwrites them.

    ``inplace`` is accepted for compatibility with Horovod and has no effect.

    ``process_set``: by default all ranks of the job. Raises TypeError for what is not a list of variables, and the
    exceptions of :func:`broadcast_`.

    Example, on two ranks:

        variable = tf.Variable([1.0 + hvd.rank(), 2.0])
        hvd.broadcast_variables([variable], root_rank=0)
        variable  # -> [1.0, 2.0]
    """
    if hasattr(variables, "assign") or not isinstance(variables, Iterable):
        raise TypeError(
            f"broadcast_variables takes a list of variables, such as model.variables, got {shown(variables)}"
        )
    assigned = broadcast_(list(variables), root_rank, "broadcast_variables", process_set)
    return None if tf.executing_eagerly() else tf.group(*assigned)


@do_not_convert
def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that broadcasts all variables of a graph of TensorFlow 1 from rank `root_rank`.

    Raises RuntimeError in eager mode, in which TensorFlow has no list of variables.

    Example, on two ranks:

        hvd.broadcast_global_variables(root_rank=0)  # raises RuntimeError
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = tf.compat.v1.Variable([1.0 + hvd.rank(), 2.0], use_resource=True)
            broadcast = hvd.broadcast_global_variables(root_rank=0)
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(broadcast)
            value = session.run(variable)
        value  # -> [1.0, 2.0]
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables is for graphs of TensorFlow 1; use broadcast_variables(model.variables, "
            "root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all variables when a session of TensorFlow 1 has been created.

    ``device``: the device on which TensorFlow places the operations."""

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
    """Returns the object (``obj``) of rank `root_rank` on every rank. Objects of other ranks are ignored. The object
    must be picklable.

    ``session`` is accepted for compatibility with Horovod and has no effect.

    ``name`` pairs the calls of the ranks. ``process_set``: by default all ranks of the job. Raises the exceptions of
    :func:`horoplug.broadcast_object`.

    Example, on two ranks:

        settings = {"epochs": 3} if hvd.rank() == 0 else None
        hvd.broadcast_object(settings, root_rank=0)  # -> {"epochs": 3}
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function that calls :func:`broadcast_object` with these arguments.

    ``session`` is accepted for compatibility with Horovod and has no effect.

    ``root_rank``, ``name`` and ``process_set``: see :func:`broadcast_object`. Raises nothing; the function raises the
    exceptions of :func:`broadcast_object`.

    Example, on two ranks:

        broadcast = hvd.broadcast_object_fn(root_rank=0)
        broadcast({"rank": hvd.rank()})  # -> {"rank": 0}
    """

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns the objects (``obj``) of all ranks of the set in rank order. They must be picklable.

    ``session`` is accepted for compatibility with Horovod and has no effect.

    ``name`` pairs the calls of the ranks. ``process_set``: by default all ranks of the job. Raises the exceptions of
    :func:`horoplug.allgather_object`.

    Example, on two ranks:

        hvd.allgather_object({"rank": hvd.rank()})  # -> [{"rank": 0}, {"rank": 1}]
    """
    return objects.allgather_object(obj, name, process_set)
