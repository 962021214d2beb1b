"""Excludes functions that call the core from the graphs of torch.compile."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

_torch: Any = torch  # typed as Any, because the functions below are private


def run_eagerly(function: _Function) -> _Function:
    """Decorator: torch.compile calls the function unchanged, outside of its graphs."""
    decorated: _Function = _torch._disable_dynamo(function)
    return decorated


def run_methods_eagerly(of: _Class) -> _Class:
    """Class decorator: torch.compile calls the methods of the class unchanged, outside of its graphs, also where C++
    code calls them while a compiled function runs.

    Unlike :func:`run_eagerly`, it adds nothing to a call, and does not import the compiler, which takes seconds."""
    for method in vars(of).values():
        function = getattr(method, "fget", None) or getattr(method, "__func__", method)
        if isinstance(function, types.FunctionType):
            function.__dict__["_torchdynamo_disable"] = True  # a call in compiled code
            _skip(function.__code__)  # a call of C++ code
    return of


def _skipping() -> Callable[[types.CodeType], object]:
    frames = _torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP  # here, and in what the code calls
        strategy = frames._FrameExecStrategy(skip, skip)
        return lambda code: frames.set_code_exec_strategy(code, strategy)
    older: Callable[[types.CodeType], object] = getattr(frames, "skip_code", lambda code: None)
    return older


_skip = _skipping()
