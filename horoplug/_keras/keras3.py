"""Distributed optimizers of Keras 3, which reduce gradients over the ranks before any other processing.

The optimizer remains the same object, with its variables and its place in a model. Only its class changes, to a class
that is derived from the original one. Gradients are reduced when they are passed to ``apply``. An optimizer that
accumulates gradients reduces the accumulated ones in ``_clip_gradients``, so that the passes in between need no
communication. Before 3.5, Keras clips gradients before it accumulates them: there, those of each pass are reduced."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from horoplug._keras import backends
from horoplug._keras.distribution import Distribution, is_distributed, make_distributed
from horoplug._keras.jit import compile_where_possible
from horoplug.common.keras_updates import updating
from horoplug.common.reduction_options import ReductionOptions


class _DistributedMixin:
    """The base class that is added to the class of the user's optimizer."""

    # An attribute of the class, so that `from_config` creates a distributed optimizer.
    _horoplug: Distribution

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of a variable from the reduction."""
        self._horoplug.register_local(var)

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """The optimizer's own method on the reduced gradients."""
        distribution = self._horoplug
        if distribution.applying:
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        variables = self._trainable_variables if trainable_variables is None else None
        if variables is None:
            variables = trainable_variables = list(trainable_variables)
        grads = list(grads)
        if len(grads) != len(variables):  # Keras raises an error
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        steps = self.gradient_accumulation_steps if _accumulates_first(self) else None
        pending = _accumulated(grads, variables) if steps else None
        if not steps and grads:
            grads = distribution.reduce(grads, variables)
        distribution.enter(pending)
        try:
            with updating(self, grads, variables):
                result = super().apply(grads, trainable_variables)  # type: ignore[misc]
        finally:
            distribution.leave()
        if pending:
            distribution.check_reduced(steps)
        return result

    def stateless_apply(
        self: Any, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        """The optimizer's own method on the reduced gradients."""
        arguments = optimizer_variables, grads, trainable_variables
        if self.gradient_accumulation_steps or self._horoplug.applying or not self.built:
            return super().stateless_apply(*arguments)  # type: ignore[misc]
        # Reduced here, because a LossScaleOptimizer does not call `apply`.
        grads = self._horoplug.reduce(list(grads), self._trainable_variables)
        self._horoplug.enter(None)
        try:
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]
        finally:
            self._horoplug.leave()

    def _clip_gradients(self: Any, grads: Sequence[Any]) -> Any:
        if self._horoplug.pending is not None:
            is_step = (self._iterations + 1) % self.gradient_accumulation_steps == 0
            grads = self._horoplug.reduce_accumulated(list(grads), is_step)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    @property
    def iterations(self: Any) -> Any:
        """The optimizer's own value; with ``backward_passes_per_step``, the number of passes."""
        if not _accumulates_first(self):
            return vars(self)["iterations"]
        distribution = self._horoplug
        if distribution.options.backward_passes_per_step > 1 and not distribution.applying:
            return self._iterations
        return super().iterations  # type: ignore[misc]

    @iterations.setter
    def iterations(self: Any, value: Any) -> None:
        vars(self)["iterations"] = value  # by the constructor of Keras before 3.5


def _accumulates_first(optimizer: Any) -> bool:
    """Whether Keras accumulates gradients before it clips them: from 3.5 on, where ``iterations`` is a property of the
    class and no attribute of the object."""
    return "iterations" not in vars(optimizer)


def _accumulated(grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The variables whose gradients Keras accumulates."""
    return [
        variable
        for grad, variable in zip(grads, variables, strict=True)
        if grad is not None and not getattr(variable, "overwrite_with_gradient", False)
    ]


def distribute(optimizer: Any, options: ReductionOptions) -> Any:
    """Make an optimizer of Keras 3 a distributed one."""
    # Not an import statement, because only callers that need Keras may import it.
    keras = importlib.import_module("keras")
    _make_ranks_agree(keras.optimizers.LossScaleOptimizer)
    backend = backends.load(keras.backend.backend())
    if hasattr(backend, "can_compile"):
        compile_where_possible(keras.Model, backend.can_compile, is_distributed)
    factor, passes = 1, options.backward_passes_per_step
    if passes > 1:
        _accumulate(getattr(optimizer, "inner_optimizer", optimizer), passes)
        factor = (
            1 if options.average_aggregated_gradients else passes
        )  # Keras divides the accumulated gradients
    distribution = Distribution(backend, options, factor)
    return make_distributed(optimizer, _DistributedMixin, distribution)


def _make_ranks_agree(kind: Any) -> None:
    """Patch LossScaleOptimizer so that all ranks skip the same steps.

    ``compile`` may wrap a distributed optimizer in a LossScaleOptimizer, which skips steps whose gradients are not
    finite. A rank that skipped a step alone would not run the reduction that the other ranks wait for."""
    own_check = kind.check_finite
    if hasattr(own_check, "_horoplug"):
        return

    @functools.wraps(own_check)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = own_check(self, grads)
        inner = self.inner_optimizer
        if is_distributed(inner) and not is_distributed(self):
            finite = inner._horoplug.all_ranks_finite(finite)
        return finite

    check_finite._horoplug = True  # type: ignore[attr-defined]
    kind.check_finite = check_finite


def _accumulate(optimizer: Any, steps: int) -> None:
    """Make an optimizer accumulate the gradients of ``steps`` passes."""
    configured = optimizer.gradient_accumulation_steps
    if configured == steps:  # a saved distributed optimizer has this setting
        return
    if configured:
        raise ValueError(
            f"backward_passes_per_step={steps}, but the optimizer has gradient_accumulation_steps={configured}: set "
            "only one of them"
        )
    optimizer.gradient_accumulation_steps = steps
    if optimizer.built:
        optimizer._accumulated_gradients = [
            optimizer.add_variable_from_reference(variable, name="gradient_accumulator")
            for variable in optimizer._trainable_variables
        ]
