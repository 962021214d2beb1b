"""Excludes functions that call the core from the graphs of torch.compile."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

_torch: Any = torch  # typed as Any, because the function below is private


def run_eagerly(function: _Function) -> _Function:
    """Decorator: torch.compile calls the function unchanged, outside of its graphs."""
    decorated: _Function = _torch._disable_dynamo(function)
    return decorated
