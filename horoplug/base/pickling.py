"""Which part of a function, or of other objects, cannot be pickled, for messages of one line."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

try:  # also pickles functions and classes of the main script
    from cloudpickle import dumps as dumps
except ImportError:
    from pickle import dumps as dumps

_DEPTH: Final = 30  # levels at which the search gives up, and names what it has found so far


class Unpicklable(NamedTuple):
    """The innermost object that cannot be pickled. ``path``: from ``owner``, the innermost function around it, or else
    from the object that was searched; ``why``: the error in one line."""

    value: Any
    path: str
    owner: str
    why: str

    def __str__(self) -> str:
        kind = type(self.value)
        module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
        name = f"{module}{kind.__qualname__}"
        if self.owner:
            return f"the variable {self.path} of {self.owner}, a {name}, cannot be pickled ({self.why})"
        return f"{self.path}, a {name}, cannot be pickled ({self.why})" if self.path else self.why


def find_unpicklable(
    value: Any, path: str = "", *, only_containers: bool = False
) -> Unpicklable | None:
    """The first part of a value that cannot be pickled; None if there is none. ``path``: what the value is called.
    ``only_containers``: look into dictionaries, lists and tuples, and not into other objects."""
    return _find(value, path, "", only_containers, 0, {})


def _find(
    value: Any, path: str, owner: str, only_containers: bool, depth: int, seen: dict[int, Any]
) -> Unpicklable | None:
    if id(value) in seen:  # it contains itself
        return None
    seen[id(value)] = value
    try:
        dumps(value)
    except Exception as error:  # whatever __reduce__ raises
        for step, part, of in _parts(value, only_containers) if depth < _DEPTH else ():
            inner = (step, of) if of else (path + step, owner)
            if (found := _find(part, *inner, only_containers, depth + 1, seen)) is not None:
                return found
        line = next((each.strip() for each in str(error).splitlines() if each.strip()), "")
        why = f"{type(error).__name__}: {line}" if line else type(error).__name__
        return Unpicklable(value, path, owner, why)
    return None


def _parts(value: Any, only_containers: bool) -> Iterator[tuple[str, Any, str]]:
    """What an object consists of: how it is reached, the part, and the function whose variable it is, if it is one."""
    if type(value) is dict:
        yield from ((f"[{key!r}]", part, "") for key, part in value.items())
    elif type(value) in (list, tuple):
        yield from ((f"[{index}]", part, "") for index, part in enumerate(value))
    elif only_containers:
        return
    elif isinstance(value, types.FunctionType):
        yield from ((name, part, value.__qualname__) for name, part in _variables(value))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__, value.__qualname__
        yield "", value.__func__, ""
    elif isinstance(value, functools.partial):
        yield "", value.func, ""
        yield from ((f".args[{index}]", part, "") for index, part in enumerate(value.args))
        yield from ((f".keywords[{key!r}]", part, "") for key, part in value.keywords.items())
    elif isinstance(value, (staticmethod, classmethod)):
        yield "", value.__func__, ""
    elif isinstance(value, property):
        yield "", value.fget, ""
    elif isinstance(value, type) or not _is_custom(type(value)):
        yield from ((f".{name}", part, "") for name, part in _attributes(value).items())
        if not isinstance(value, type):
            yield "", type(value), ""


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes that a value is pickled with. Some classes, such as PyTorch's Module, choose them themselves."""
    getstate = getattr(type(value), "__getstate__", None)
    if isinstance(value, type) or getstate is getattr(object, "__getstate__", None):
        return dict(getattr(value, "__dict__", {}))
    try:
        state = value.__getstate__()
    except Exception:  # that is why pickling has failed
        return {}
    return dict(state) if isinstance(state, dict) else {}


def _is_custom(kind: type) -> bool:
    """Whether instances are not pickled by their attributes, so that these do not tell why pickling has failed."""
    hooks = ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
    own = (getattr(kind, hook, None) is not getattr(object, hook, None) for hook in hooks)
    return any(own) or issubclass(kind, types.ModuleType)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function is pickled with: variables of functions around it, globals that it uses, defaults of arguments,
    and attributes."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for name in dict.fromkeys(_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from function.__dict__.items()


def _names(code: types.CodeType) -> Iterator[str]:
    """Names of globals, and of attributes, that a function and those inside of it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def why_not(function: Any, args: Any, kwargs: Any, error: BaseException) -> str:
    """Why a call cannot be pickled, in one line. ``error``: what pickling has raised."""
    for value, path in ((function, "the function"), (args, "args"), (kwargs, "kwargs")):
        if (found := find_unpicklable(value, path)) is not None:
            return str(found)
    return " ".join(str(error).split()) or type(error).__name__
