"""``DistributedOptimizer``: an optimizer of Keras 3 that reduces the gradients of all ranks before it does anything
else with them.

The optimizer stays the object that it is, with its variables and its place in a model; only its class becomes one that
is derived from its own, and passes for it where Keras saves it. Gradients are reduced as they come to ``apply``. An
optimizer that accumulates gradients reduces what it has accumulated, where it would clip it: no communication in
between.
"""

import functools
import importlib
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from horoplug._keras import backends
from horoplug._keras.jit import compile_where_possible
from horoplug._keras.options import Options, Reduction
from horoplug.common.context import context

Optimizer = TypeVar("Optimizer")


class Distributed(Protocol):
    """What the result of :func:`DistributedOptimizer` has in addition."""

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to this rank alone."""


class Distribution:
    """What an optimizer knows of the other ranks."""

    def __init__(self, backend: Any, options: Options, passes: int, factor: int) -> None:
        self.options = options
        self.reduction: Reduction = backend.BackendReduction(options)
        self.passes = (
            passes  # backward_passes_per_step; 1 if Keras accumulates for a reason of its own
        )
        self.local: dict[int, Any] = {}  # variables that are not reduced, by their id
        self._backend = backend
        self._factor = factor
        self._thread = threading.local()
        self._not_reduced = 0  # gradients were given so often since they were reduced last

    @property
    def name(self) -> str:
        """What the names of this optimizer's operations begin with, and those of no other.

        Keras' own names count what a process has made, which may differ between ranks. This one counts distributed
        optimizers, from the job's beginning and in the order of their first use, which is the same on every rank."""
        known = context.per_job.setdefault(Distribution, weakref.WeakKeyDictionary())
        if self not in known:
            count = context.per_job.setdefault((Distribution, self.options.name), itertools.count())
            number = next(count)
            known[self] = f"{self.options.name}_{number}" if number else self.options.name
        name: str = known[self]
        return name

    def register_local(self, variable: Any) -> None:
        native = self._backend.native(variable)
        self.local[id(native)] = native  # kept, so that nobody else gets its id

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients that the optimizer goes on with."""
        is_local = [id(self._backend.native(variable)) in self.local for variable in variables]
        shared = [None if own else g for g, own in zip(gradients, is_local, strict=True)]
        reduced = self.reduction.reduce(shared, variables, self.name)
        whole = [
            self.reduction.local(g) if own else r
            for g, r, own in zip(gradients, reduced, is_local, strict=True)
        ]
        if self._factor != 1:
            whole = [None if g is None else g * self._factor for g in whole]
        return whole

    def agree(self, finite: Any) -> Any:
        """Whether gradients are finite on all ranks."""
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
        """The variables of the gradients that :meth:`reduce_late` will be given."""
        return getattr(self._thread, "pending", None)

    def enter(self, pending: list[Any] | None) -> None:
        self._thread.applying, self._thread.pending = True, pending

    def leave(self) -> None:
        self._thread.applying, self._thread.pending = False, None

    def reduce_late(self, gradients: list[Any], is_step: Any) -> Any:
        """:meth:`reduce` for an optimizer that has accumulated gradients."""
        variables = self.pending
        assert variables is not None
        self._not_reduced = -1
        return self._backend.if_step(is_step, lambda g: self.reduce(g, variables), gradients)

    def check_reduced(self, steps: int) -> None:
        """Raise RuntimeError if an optimizer of somebody's own accumulates in another way than Keras does."""
        self._not_reduced += 1
        if self._not_reduced > steps:
            raise RuntimeError(
                "the optimizer has applied accumulated gradients without clipping them by `_clip_gradients` before, "
                "which is where DistributedOptimizer reduces them; use it without gradient_accumulation_steps."
            )


class _Distributed:
    """What is put before the class of the user's optimizer."""

    _horoplug: (
        Distribution  # of the class, so that `from_config` makes an optimizer of the same kind
    )

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to this rank alone."""
        self._horoplug.register_local(var)

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """As the optimizer's own, on the gradients of all ranks."""
        distribution = self._horoplug
        if distribution.applying:
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        variables = self._trainable_variables if trainable_variables is None else None
        if variables is None:
            variables = trainable_variables = list(trainable_variables)
        grads = list(grads)
        if len(grads) != len(variables):  # Keras has an error for it
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        steps = self.gradient_accumulation_steps
        pending = _kept(grads, variables) if steps else None
        if not steps and grads:
            grads = distribution.reduce(grads, variables)
        distribution.enter(pending)
        try:
            result = super().apply(grads, trainable_variables)  # type: ignore[misc]
        finally:
            distribution.leave()
        if pending:
            distribution.check_reduced(steps)
        return result

    def stateless_apply(
        self: Any, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        """As the optimizer's own, on the gradients of all ranks."""
        arguments = optimizer_variables, grads, trainable_variables
        if self.gradient_accumulation_steps or self._horoplug.applying or not self.built:
            return super().stateless_apply(*arguments)  # type: ignore[misc]
        # Here, since a LossScaleOptimizer does not call `apply`.
        grads = self._horoplug.reduce(list(grads), self._trainable_variables)
        self._horoplug.enter(None)
        try:
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]
        finally:
            self._horoplug.leave()

    def _clip_gradients(self: Any, grads: Sequence[Any]) -> Any:
        if self._horoplug.pending is not None:
            is_step = (self._iterations + 1) % self.gradient_accumulation_steps == 0
            grads = self._horoplug.reduce_late(list(grads), is_step)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    @property
    def iterations(self: Any) -> Any:
        """As the optimizer's own; with ``backward_passes_per_step``, the number of passes."""
        distribution = self._horoplug
        if distribution.passes > 1 and not distribution.applying:
            return self._iterations
        return super().iterations  # type: ignore[misc]


def _kept(grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The variables whose gradients Keras accumulates."""
    return [
        variable
        for grad, variable in zip(grads, variables, strict=True)
        if grad is not None and not getattr(variable, "overwrite_with_gradient", False)
    ]


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer is the result of :func:`DistributedOptimizer`."""
    return hasattr(type(optimizer), "_horoplug")


def distribute(
    optimizer: Any, options: Options, backend: str, passes: int, average_aggregated: bool
) -> Any:
    """Make an optimizer of Keras 3 a distributed one.

    ``passes``: backward_passes_per_step; ``average_aggregated``: average_aggregated_gradients."""
    module = backends.load(backend)
    if hasattr(module, "can_compile"):
        model = importlib.import_module("keras").Model
        compile_where_possible(model, module.can_compile, is_distributed)
    factor = 1
    if passes > 1:
        _accumulate(getattr(optimizer, "inner_optimizer", optimizer), passes)
        factor = 1 if average_aggregated else passes  # Keras divides what it has accumulated
    return take_class(optimizer, _Distributed, Distribution(module, options, passes, factor))


def take_class(optimizer: Any, mixin: type, distribution: Distribution) -> Any:
    """Have an object be of a class that is derived from ``mixin`` and from its own, and passes for its own where Keras
    looks when it saves it: what Keras writes is read without horoplug, too."""
    kind = type(optimizer)
    body = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__class__": property(lambda self: kind),
        "_horoplug": distribution,
    }
    object.__setattr__(optimizer, "__class__", type(kind.__name__, (mixin, kind), body))
    return optimizer


def _have_ranks_agree(kind: Any) -> None:
    """``compile`` may put a LossScaleOptimizer around a distributed optimizer. It leaves out steps with gradients that
    are not finite, and a rank that left out a step on its own would never come to the reduction."""
    own_check = kind.check_finite
    if hasattr(own_check, "_horoplug"):
        return

    @functools.wraps(own_check)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = own_check(self, grads)
        inner = self.inner_optimizer
        if is_distributed(inner) and not is_distributed(self):
            finite = inner._horoplug.agree(finite)
        return finite

    check_finite._horoplug = True  # type: ignore[attr-defined]
    kind.check_finite = check_finite


def _accumulate(optimizer: Any, steps: int) -> None:
    """Have an optimizer accumulate the gradients of so many passes."""
    known = optimizer.gradient_accumulation_steps
    if known == steps:  # it was saved so
        return
    if known:
        raise ValueError(
            f"backward_passes_per_step={steps}, but the optimizer has gradient_accumulation_steps={known}: give only "
            "one of them."
        )
    optimizer.gradient_accumulation_steps = steps
    if optimizer.built:
        optimizer._accumulated_gradients = [
            optimizer.add_variable_from_reference(variable, name="gradient_accumulator")
            for variable in optimizer._trainable_variables
        ]


def make(optimizer: Optimizer, arguments: Mapping[str, Any]) -> Optimizer:
    """``DistributedOptimizer`` and ``PartialDistributedOptimizer`` of :mod:`horoplug.keras` and
    :mod:`horoplug.tensorflow.keras`, from the arguments of the user's call by name; see there."""
    if is_distributed(optimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already.")
    if isinstance(optimizer, type) or not hasattr(optimizer, "apply_gradients"):
        raise ValueError(
            f"DistributedOptimizer takes an optimizer of Keras, got {optimizer!r}; make an object of it, such as "
            "keras.optimizers.Adam()."
        )
    passes = arguments["backward_passes_per_step"], arguments["average_aggregated_gradients"]
    if passes[0] < 1:
        raise ValueError(f"backward_passes_per_step={passes[0]}: it must be positive.")
    name = arguments["name"] or f"Distributed{type(optimizer).__name__}"
    options = Options.of(name, arguments)
    made: Any
    if hasattr(optimizer, "stateless_apply"):
        keras = importlib.import_module("keras")
        _have_ranks_agree(keras.optimizers.LossScaleOptimizer)
        made = distribute(optimizer, options, keras.backend.backend(), *passes)
    else:
        from horoplug._keras import legacy

        made = legacy.distribute(optimizer, options, *passes)
    local_layers = arguments.get("local_layers")
    layers = local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    for layer in layers:
        for variable in layer.trainable_weights if layer is not None else ():
            made.register_local_var(variable)
    return made
