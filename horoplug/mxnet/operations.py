"""The operations on MXNet's NDArrays, generated from the table in :mod:`horoplug.common.opspec`. Editors and type
checkers see them in operations.pyi.

Horovod's functions for MXNet take their arguments in an order of their own, and one more: ``priority``."""

import inspect
from typing import Any, Final

from horoplug.common.variants import Function, operation_of, operations
from horoplug.mxnet.adapter import ADAPTER

_ORDER: Final = {
    "allreduce": "average name priority prescale_factor postscale_factor process_set op",
    "allgather": "name priority process_set",
    "broadcast": "root_rank name priority process_set",
    "alltoall": "splits name priority process_set",
    "reducescatter": "op name priority process_set prescale_factor postscale_factor",
}
_PRIORITY = "``priority``: accepted for compatibility with Horovod, and has no effect.\n"


def _horovods(function: Function, order: str) -> Function:
    """The function with its arguments in this order."""
    given = inspect.signature(function)
    first, *rest = given.parameters.values()
    by_name = {each.name: each for each in rest}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    by_name["priority"] = inspect.Parameter("priority", kind, default=0, annotation=int)
    ordered = [by_name[name] for name in order.split()]
    # Without a default behind one that has it.
    signature = given.replace(parameters=[first, *ordered])

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        arguments.pop("priority", None)
        return function(**arguments)

    call.__name__ = call.__qualname__ = function.__name__
    call.__module__ = function.__module__
    text = function.__doc__ or ""
    call.__doc__ = text.replace("\n``process_set``:", f"\n{_PRIORITY}``process_set``:", 1)
    made: Any = call
    made.__signature__ = signature
    parameters = {each.name: each.annotation for each in signature.parameters.values()}
    call.__annotations__ = {"return": signature.return_annotation, **parameters}
    return call


_FUNCTIONS = {
    name: _horovods(function, _ORDER[operation_of(name)])
    if operation_of(name) in _ORDER
    else function
    for name, function in operations(ADAPTER, __name__).items()
}
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)
