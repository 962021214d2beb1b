"""``DistributedOptimizer(op=Adasum)``: every rank steps by itself, and Adasum combines the steps.

Adasum is made for the steps that an optimizer takes (its deltas), not for gradients: state such as momentum stays
local, and what has gone through it is combined. When backward has computed a parameter's gradient, a hook steps this
parameter alone, puts it back to where it was, and submits the difference; ``step`` waits for the differences and adds
them. So parameters change in ``step`` only, and are the same on all ranks.
"""

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from horoplug.torch.optimizer import _DistributedOptimizer
from horoplug.torch.reduction import Reducer


class _DeltaReducer(Reducer):
    """Reduces differences as the other one does gradients."""

    def __init__(self, delta: Callable[[], Any], *options: Any) -> None:
        super().__init__(*options)
        self._delta = delta  # a weak reference: the optimizer holds this object
        self._sends_as_is = False

    def _pack(self, parameter: torch.Tensor) -> tuple[torch.Tensor, Any]:
        tensor, kept = self._compress(self._delta()(parameter))
        return tensor.contiguous(), kept

    def _take(self, parameter: torch.Tensor, tensor: torch.Tensor, kept: Any) -> None:
        parameter.add_(self._decompress(tensor, kept))


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """What is put before the class of the user's optimizer. Hooks, names, handles and compression are those of the
    other one; what it does to a gradient, this does to a difference.

    Clipping gradients between backward and step comes too late; use a hook of the parameter for that."""

    def _make_reducer(self, *options: Any) -> Reducer:
        return _DeltaReducer(weakref.WeakMethod(self._delta), *options)

    def _delta(self, parameter: torch.Tensor) -> torch.Tensor:
        """What the wrapped optimizer adds to a parameter; its state for it goes on, the parameter is as before.

        Zeros if there is no gradient: the other ranks may have one."""
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
        """The step of the user's optimizer, without the step hooks: they are run once for all parameters."""
        step = super(_DistributedOptimizer, type(self)).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(self)

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the combined differences and add them to the parameters. Returns what the closure does.

        Raises HorovodInternalError if one could not be combined; no parameter has changed then."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish()
        return loss

    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Nothing: there are no gradients to wait for."""

    def skip_synchronize(self) -> NoReturn:
        """AssertionError: ``step`` is where differences are added."""
        raise AssertionError(
            "skip_synchronize() is not possible with op=Adasum: step() has to wait for the combined "
            "steps of all ranks."
        )
