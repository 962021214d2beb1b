"""Excludes functions that call the core from the graphs of torch.compile."""

from __future__ import annotations

import functools
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


def run_callback_eagerly(function: _Function) -> _Function:
    """Decorator: torch.compile calls the function unchanged, outside of its graphs, also where C++ code calls it while
    a compiled function runs, such as autograd in the backward pass of a compiled step.

    Unlike :func:`run_eagerly`, it does not import the compiler, which takes seconds, and adds nothing to a call; with
    PyTorch before 2.7, some 0.2 microseconds."""
    function.__dict__["_torchdynamo_disable"] = True  # a call in compiled code
    decorated: _Function = _skip(function)  # a call of C++ code
    return decorated


def run_methods_eagerly(of: _Class) -> _Class:
    """Class decorator: :func:`run_callback_eagerly` for the methods of the class."""
    for name, member in list(vars(of).items()):
        if isinstance(member, types.FunctionType):
            setattr(of, name, run_callback_eagerly(member))
        elif isinstance(member, property):
            parts: Any = (member.fget, member.fset, member.fdel)
            setattr(of, name, property(*(part and run_callback_eagerly(part) for part in parts)))
        elif isinstance(member, (classmethod, staticmethod)):
            setattr(of, name, type(member)(run_callback_eagerly(member.__func__)))
    return of


_frames = _torch._C._dynamo.eval_frame


def _skip_all(function: Any) -> Any:
    """PyTorch 2.7 and newer: neither this function nor what it calls is compiled."""
    skip = _frames._FrameAction.SKIP
    strategy = _frames._FrameExecStrategy(skip, skip)
    _frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def _switch_off(function: Any) -> Any:
    """Older ones: ``skip_code`` does not extend to what a function calls, so the compiler is switched off meanwhile."""

    def call(*args: Any, **options: Any) -> Any:
        compiler = _frames.set_eval_frame(None)
        try:
            return function(*args, **options)
        finally:
            _frames.set_eval_frame(compiler)

    _frames.skip_code(call.__code__)
    return functools.update_wrapper(call, function)


_skip = _skip_all if hasattr(_frames, "_FrameExecStrategy") else _switch_off
