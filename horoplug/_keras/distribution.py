"""The state that makes a Keras optimizer a distributed one."""

import threading
from collections.abc import Sequence
from typing import Any

from horoplug._keras.options import KerasReduction
from horoplug.base.alias import public_name
from horoplug.common.keras_updates import change_class
from horoplug.common.per_job import FirstUses, PerJob
from horoplug.common.reduction_options import ReductionOptions

_OPTIMIZERS = PerJob(FirstUses)


class Distribution:
    """How a distributed optimizer reduces gradients. ``factor``: the reduced gradients are multiplied by this
    number."""

    def __init__(self, backend: Any, options: ReductionOptions, factor: int) -> None:
        self.options = options
        self.reduction: KerasReduction = backend.BackendReduction(options)
        # Variables that are not reduced, by id. The dictionary holds the objects, so that their ids are not used again.
        self.local: dict[int, Any] = {}
        self._backend = backend
        self._factor = factor
        self._thread = threading.local()
        self._passes_since_reduction = 0

    @property
    def name(self) -> str:
        """The prefix of the names of this optimizer's operations, which no other optimizer has."""
        index = _OPTIMIZERS.get().number(self, self.options.name)
        return f"{self.options.name}_{index}" if index else self.options.name

    def register_local(self, variable: Any) -> None:
        """Exclude the gradient of a variable from the reduction."""
        native = self._backend.native(variable)
        self.local[id(native)] = native

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients that the optimizer applies."""
        is_local = [id(self._backend.native(variable)) in self.local for variable in variables]
        shared = [None if local else g for g, local in zip(gradients, is_local, strict=True)]
        reduced = self.reduction.reduce(shared, variables, self.name)
        results = [
            self.reduction.local(g) if local else r
            for g, r, local in zip(gradients, reduced, is_local, strict=True)
        ]
        if self._factor != 1:
            results = [None if g is None else g * self._factor for g in results]
        return results

    def all_ranks_finite(self, finite: Any) -> Any:
        """Whether gradients are finite on all ranks. ``finite``: whether they are on this rank."""
        if self.options.process_set.included() is False:
            return finite
        options = {"name": f"{self.name}.finite", "process_set": self.options.process_set}
        return self._backend.all_true(finite, **options)

    @property
    def applying(self) -> bool:
        """Whether this thread is inside of the optimizer's ``apply``."""
        return getattr(self._thread, "applying", False)

    @property
    def pending(self) -> list[Any] | None:
        """The variables of the accumulated gradients that :meth:`reduce_accumulated` will get."""
        return getattr(self._thread, "pending", None)

    def enter(self, pending: list[Any] | None) -> None:
        """Begin the optimizer's ``apply`` in this thread. ``pending``: see :attr:`pending`."""
        self._thread.applying, self._thread.pending = True, pending

    def leave(self) -> None:
        """End the optimizer's ``apply`` in this thread."""
        self._thread.applying, self._thread.pending = False, None

    def reduce_accumulated(self, gradients: list[Any], is_step: Any) -> Any:
        """:meth:`reduce` for accumulated gradients. ``is_step``: whether the optimizer applies them."""
        variables = self.pending
        assert variables is not None
        self._passes_since_reduction = -1
        return self._backend.if_step(is_step, lambda g: self.reduce(g, variables), gradients)

    def check_reduced(self, steps: int) -> None:
        """Count a pass. Raises RuntimeError if accumulated gradients were not reduced, because a custom optimizer does
        not accumulate them like Keras."""
        self._passes_since_reduction += 1
        if self._passes_since_reduction > steps:
            raise RuntimeError(
                "the optimizer has applied accumulated gradients without calling `_clip_gradients` before, in which "
                "DistributedOptimizer reduces them; use it without gradient_accumulation_steps"
            )


def make_distributed(optimizer: Any, mixin: type, distribution: Distribution) -> Any:
    """Give an optimizer the methods of ``mixin``, which use ``distribution``. Under ``--compat``, "horovod" is in the
    name of its type, by which programs see whether an optimizer is distributed."""
    module = public_name("horoplug._keras")
    return change_class(optimizer, mixin, __module__=module, _horoplug=distribution)


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer is the result of ``DistributedOptimizer``."""
    return hasattr(type(optimizer), "_horoplug")
