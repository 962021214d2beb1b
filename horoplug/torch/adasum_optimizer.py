"""``DistributedOptimizer(op=Adasum)``: every rank steps separately, and Adasum combines the steps.

Adasum (Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020) combines the steps of an optimizer,
which are the changes of the parameters, instead of gradients. State such as momentum stays local to a rank. When
backward has computed the gradient of a parameter, a hook steps this parameter alone, restores its old value, and
submits the difference; ``step`` waits for the combined differences and adds them. So parameters change in ``step``
only, and are the same on all ranks."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from horoplug.torch.distributed_optimizer import _DistributedOptimizer
from horoplug.torch.plain import plain
from horoplug.torch.reduction import Reducer


class _DeltaReducer(Reducer):
    """Reduces the changes of parameters instead of their gradients."""

    def __init__(self, optimizer: "_DistributedAdasumOptimizer") -> None:
        super().__init__(optimizer._parameter_names, optimizer._options)
        # The optimizer holds this object.
        self._delta: Callable[[], Any] = weakref.WeakMethod(optimizer._delta)
        self._sends_as_is = False

    def _pack(self, parameter: torch.Tensor) -> tuple[torch.Tensor, Any]:
        tensor, kept = self._compress(self._delta()(parameter))
        return plain(tensor), kept

    def _note_changes(self, parameters: Sequence[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Gradients are not sent, so the program may change them."""

    def _take(self, parameter: torch.Tensor, tensor: torch.Tensor, kept: Any) -> None:
        parameter.add_(self._decompress(tensor, kept))


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """A :class:`_DistributedOptimizer` that reduces the changes of parameters instead of gradients.

    Clipping gradients between backward and ``step`` has no effect, since the step was computed in backward; clip in a
    hook of the parameter."""

    def _make_reducer(self) -> Reducer:
        return _DeltaReducer(self)

    def _delta(self, parameter: torch.Tensor) -> torch.Tensor:
        """The change of a parameter in a step of the wrapped optimizer. The step updates the optimizer's state, and the
        parameter keeps its value. The change is zero without a gradient, and is reduced because other ranks may have
        one."""
        start = parameter.clone()
        groups = self.param_groups
        group = groups[self._group_number(parameter)]
        members = group["params"]
        self.param_groups, group["params"] = [group], [parameter]
        try:
            self._step_wrapped()
        finally:
            self.param_groups, group["params"] = groups, members
        delta = parameter - start
        parameter.copy_(start)
        return delta

    def _group_number(self, parameter: torch.Tensor) -> int:
        numbers: dict[torch.Tensor, int] = self.__dict__.setdefault("_group_numbers", {})
        if parameter not in numbers:
            for number, group in enumerate(self.param_groups):
                numbers.update(dict.fromkeys(group["params"], number))
        return numbers[parameter]

    def _step_wrapped(self) -> None:
        """The step of the user's optimizer without the step hooks, which run once for all parameters."""
        step = super(_DistributedOptimizer, type(self)).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(self)

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the combined changes and add them to the parameters. Returns the result of the closure.

        Raises HorovodInternalError if a reduction failed; no parameter has changed then."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish()
        return loss

    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Does nothing, since no gradients are reduced."""

    def skip_synchronize(self) -> NoReturn:
        """Raises AssertionError, since ``step`` has to add the combined changes."""
        raise AssertionError(
            "skip_synchronize() is not possible with op=Adasum: step() has to wait for the combined "
            "steps of all ranks"
        )
