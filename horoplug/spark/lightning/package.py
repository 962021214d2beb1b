"""The package of Lightning that a module belongs to."""

from __future__ import annotations

import importlib
from typing import Any

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The same classes exist under both names, as different objects: a Trainer of one takes no module of the other."""


def package_of(module: Any) -> Any:
    """``lightning.pytorch`` or ``pytorch_lightning``, whichever has the base class of a LightningModule; None: the
    object is no LightningModule."""
    for kind in type(module).__mro__:
        if kind.__name__ == "LightningModule":
            for name in PACKAGES:
                if f"{kind.__module__}.".startswith(f"{name}."):
                    return importlib.import_module(name)
    return None
