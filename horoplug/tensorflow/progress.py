"""The updates of an optimizer in TensorFlow, eagerly and in functions, for states that are kept in place
(:mod:`horoplug.common.progress`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import tensorflow as tf

from horoplug.common.keras_updates import KerasProgress
from horoplug.tensorflow.operations import UPDATES
from horoplug.tensorflow.xla import is_compiling

_CALLS: Final = ("PartitionedCall", "StatefulPartitionedCall", "If", "While", "Case")


class TensorFlowProgress(KerasProgress):
    """Counts the updates of an optimizer in variables, since a function is traced once and runs many times.

    While a function that contains an update is traced, control dependencies are added: the update waits for all
    operations of horoplug before it, and operations of horoplug after it wait for the update. Without them TensorFlow
    would update a variable while the reduction of another one's gradient may still fail, and would stop half-way when
    any operation fails. XLA ignores control dependencies, and updates variables in place."""

    def __init__(self, optimizer: Any) -> None:
        if not tf.executing_eagerly():
            raise ValueError(
                "rollback=False is not supported in a graph of TensorFlow 1; use rollback=True"
            )
        super().__init__(optimizer)
        with tf.device("CPU:0"):
            self._count = [tf.Variable(0, trainable=False, dtype=tf.int64) for _ in range(2)]
        self._iterations = self._steps()

    def updates(self) -> tuple[int, int]:
        begun, ended = (int(variable.numpy()) for variable in self._count)
        return begun, ended

    def commit(self) -> None:
        steps = self._steps()
        if steps != self._iterations and not self.is_ahead:
            raise ValueError(
                "rollback=False: the optimizer has updated parameters in a function that was traced before the state "
                "was created; create the state before the first step"
            )
        super().commit()

    def adopt(self, commits: int) -> None:
        super().adopt(commits)
        self._iterations = self._steps()

    def _steps(self) -> int:
        return int(tf.convert_to_tensor(self._optimizer.iterations).numpy())

    @contextlib.contextmanager
    def _counted(self, gradients: Sequence[Any]) -> Iterator[None]:
        begun, ended = self._count
        if tf.executing_eagerly():
            begun.assign_add(1)
            yield
            ended.assign_add(1)
            return
        if is_compiling():
            raise ValueError(
                "rollback=False does not support updates in functions that XLA compiles, which change variables while "
                "reductions may still fail; use jit_compile=False or rollback=True"
            )
        graph = tf.compat.v1.get_default_graph()
        before = [op for op in graph.get_operations() if _may_fail(op)]
        reduced = tf.nest.flatten(list(gradients), expand_composites=True)
        with tf.control_dependencies([*before, *reduced]):
            start = begun.assign_add(1, read_value=False)
        known = len(graph.get_operations())
        with tf.control_dependencies([start]):
            yield
        with tf.control_dependencies(graph.get_operations()[known:]):
            graph.add_to_collection(UPDATES, ended.assign_add(1, read_value=False))


def _may_fail(op: Any) -> bool:
    """Whether an operation of a graph is one of horoplug, or may contain one."""
    return op.type.startswith("Horovod") or op.type in _CALLS
