"""Counts the updates of an optimizer of Keras, of any version and backend, for a state that is kept in place.

An optimizer that reduces gradients announces its updates by :func:`updating`. The class of any other optimizer is
changed to one that does."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from horoplug.common.progress import InPlaceState, Progress

Optimizer = TypeVar("Optimizer")

_PROGRESS = "_horoplug_progress"  # attribute of an optimizer whose updates are counted


class KerasProgress(Progress):
    """Counts the updates of an optimizer, and knows which variables change only in them.

    Raises ValueError for an optimizer whose updates cannot be counted, or that changes variables between them."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # a LossScaleOptimizer has one
        if not hasattr(inner, "apply_gradients") or not hasattr(inner, "iterations"):
            raise ValueError(
                f"rollback=False needs an optimizer of Keras, got {type(inner).__name__}: only its updates of the "
                "parameters are known to follow all reductions of a step; use rollback=True"
            )
        if any(_accumulates(each) for each in (optimizer, inner)):
            raise ValueError(
                "rollback=False does not support gradients that the optimizer accumulates, since each rank has other "
                "ones; use rollback=True, or neither backward_passes_per_step nor gradient_accumulation_steps"
            )
        self._optimizer = inner
        self._updated: dict[int, Any] = {}
        self._is_updating = False
        if not hasattr(type(inner), "_horoplug"):
            mixin = _Keras3 if hasattr(inner, "stateless_apply") else _Keras2
            change_class(inner, mixin)
        object.__setattr__(inner, _PROGRESS, self)  # not tracked by Keras

    def owns(self, variable: Any) -> bool:
        """Whether a variable is one that the optimizer has updated, or one of its own: it changes in updates only."""
        return id(variable) in self._updated

    @contextlib.contextmanager
    def update(self, gradients: Sequence[Any], variables: Iterable[Any]) -> Iterator[None]:
        """The context of an update of these variables by gradients that are reduced."""
        if self._is_updating:  # several classes of an optimizer announce the same update
            yield
            return
        self._is_updating = True
        try:
            with self._counted([gradient for gradient in gradients if gradient is not None]):
                yield
        finally:
            self._is_updating = False
        owned = [*variables, *optimizer_variables(self._optimizer)]
        # By id. The dictionary holds the objects, so that their ids are not used again.
        self._updated |= {id(variable): variable for variable in owned}

    @contextlib.contextmanager
    def _counted(self, gradients: Sequence[Any]) -> Iterator[None]:
        self._begun += 1
        yield
        self._ended += 1


class VariablesState(InPlaceState):
    """A state of variables of TensorFlow or Keras. The base class of their states."""

    _progress: KerasProgress | None = None

    def _all_variables(self) -> list[Any]:
        raise NotImplementedError

    def _trained(self) -> list[Any]:
        """The variables whose values are compared between ranks."""
        raise NotImplementedError

    @staticmethod
    def _read(variable: Any) -> Any:
        """A copy of a variable's value, an array of NumPy."""
        raise NotImplementedError

    def save(self) -> None:
        self._save_variables()
        super().save()

    def restore(self) -> None:
        self._restore_variables()
        super().restore()

    def _is_kept(self, variable: Any) -> bool:
        return self._progress is not None and self._progress.owns(variable)

    def _save_variables(self) -> None:
        own = (v for v in self._all_variables() if not self._is_kept(v))
        self._saved_variables = [(v, self._read(v)) for v in own]

    def _restore_variables(self) -> None:
        for variable, value in self._saved_variables:
            if not self._is_kept(variable):
                variable.assign(value)

    def _copy_own(self) -> Callable[[], None]:
        copies = [(variable, self._read(variable)) for variable in self._all_variables()]

        def restore() -> None:
            for variable, value in copies:
                variable.assign(value)

        return restore

    def _checksums(self) -> list[bytes]:
        return [hashlib.sha256(self._read(v).tobytes()).digest() for v in self._trained()]


def optimizer_variables(optimizer: Any) -> list[Any]:
    """The variables of an optimizer; an empty list for None."""
    found = getattr(optimizer, "variables", ())
    return list(found() if callable(found) else found)  # a method in Keras 2


def updating(
    optimizer: Any, gradients: Sequence[Any], variables: Iterable[Any]
) -> contextlib.AbstractContextManager[None]:
    """The context in which an optimizer updates these variables by gradients that are reduced."""
    progress = getattr(optimizer, _PROGRESS, None)
    return contextlib.nullcontext() if progress is None else progress.update(gradients, variables)


def change_class(optimizer: Optimizer, mixin: type, **attributes: Any) -> Optimizer:
    """Change the class of an object to one that is derived from ``mixin`` and its own class, with these attributes.

    ``__class__``, which Keras reads when it saves the object, remains the original class, so that the saved object can
    be loaded without horoplug."""
    kind, original = type(optimizer), optimizer.__class__
    body = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__class__": property(lambda self: original),
        **attributes,
    }
    object.__setattr__(optimizer, "__class__", type(kind.__name__, (mixin, kind), body))
    return optimizer


class _Keras3:
    """Announces the updates of an optimizer of Keras 3."""

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """The optimizer's own method."""
        grads = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        variables = self._trainable_variables if given is None else given
        with updating(self, grads, variables):
            return super().apply(grads, given)  # type: ignore[misc]


class _Keras2:
    """Announces the updates of an optimizer of Keras 2."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own method."""
        apply: Callable[..., Any] = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        with updating(self, [grad for grad, _ in pairs], [variable for _, variable in pairs]):
            return apply(pairs, *args, **kwargs)


def _accumulates(optimizer: Any) -> bool:
    aggregation = getattr(type(optimizer), "_aggregation", None)  # of a distributed one of Keras 2
    passes = getattr(aggregation, "backward_passes_per_step", 1)
    return passes > 1 or bool(getattr(optimizer, "gradient_accumulation_steps", None))
