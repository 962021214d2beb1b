"""Tells whether a program has changed gradients while they were reduced, for example by clipping them too early."""

import contextlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Final

import torch

_SCALER: Final = "amp.grad_scaler"
"""The end of the name of the module with PyTorch's GradScaler. It unscales gradients, which PyTorch does not count as a
change, or looks for infinite ones, before it calls ``optimizer.step``."""
_DEPTH: Final = 16
"""Frames to search: those of this package, and of wrappers of ``step`` such as a schedule's."""


class Changes:
    """Compares the versions of gradients when they are submitted and when they are waited for. PyTorch counts the
    operations that write to a tensor; the core writes to its memory without being counted."""

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        """``names``: the names of the parameters."""
        self._names = names
        self._noted: list[tuple[Sequence[torch.Tensor], list[torch.Tensor], list[int]]] = []
        self._told = False

    def note(self, parameters: Sequence[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """The gradients of these parameters are submitted now."""
        if not self._told:
            # Tensors of inference mode have no versions, and the program may have removed the gradient from a bucket.
            with contextlib.suppress(RuntimeError, AttributeError):
                self._noted.append((parameters, grads, [grad._version for grad in grads]))

    def warn(self) -> None:
        """Warn if a noted gradient has changed, once in the life of this object."""
        changed = self._find()
        if changed is not None:
            self._told = True
            warnings.warn(
                f"the gradient of {self._names[changed]} was changed between backward() and step(), while it was being "
                "reduced, so the ranks may differ now: call optimizer.synchronize() before you clip, unscale or change "
                "gradients, then optimizer.step() or scaler.step(optimizer) in `with optimizer.skip_synchronize():`.",
                stacklevel=2,
            )

    def forget(self) -> None:
        """No gradient is under way."""
        self._noted = []

    def _find(self) -> torch.Tensor | None:
        """The parameter of a gradient that has changed."""
        for parameters, grads, versions in self._noted:
            now = [grad._version for grad in grads]
            if now != versions:
                return next(p for p, a, b in zip(parameters, now, versions, strict=True) if a != b)
        return self._noted[0][0][0] if self._noted and _in_scaler() else None


def _in_scaler() -> bool:
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame.f_globals.get("__name__", "").endswith(_SCALER):
            return bool(frame.f_locals["self"].is_enabled())
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
