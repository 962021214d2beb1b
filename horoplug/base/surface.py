"""``__all__`` of the modules that only collect names from others, such as :mod:`horoplug.torch`."""

from types import ModuleType
from typing import Any


def declare(namespace: dict[str, Any], *submodules: str) -> None:
    """Set ``__all__`` in the namespace of a module, at its end: all names without an underscore, but only those of its
    submodules that are given.

    Type checkers do not see this value. They know a name by ``import name as name`` or ``import *``, while an
    ``__all__`` that is not a literal would hide all names from them."""
    namespace["__all__"] = [
        name
        for name, value in namespace.items()
        if not name.startswith("_") and (name in submodules or not isinstance(value, ModuleType))
    ]
