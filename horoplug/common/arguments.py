"""Errors for arguments of a wrong kind: one line that names the argument and says what to pass."""

import operator
import sys
from collections.abc import Callable
from typing import Any, Final

from horoplug.common.opspec import Call, OpSpec

# By an attribute of a value that is no tensor: how its user gets one.
_CONVERSIONS: Final = (
    ("toarray", "pass x.toarray()"),  # scipy.sparse
    ("todense", "pass x.todense()"),  # jax.experimental.sparse
    ("to_numpy", "pass x.to_numpy()"),  # pandas
    ("__array__", "pass {convert}(x)"),
    ("__array_interface__", "pass {convert}(x)"),
)
_OBJECTS: Final = (str, bytes, dict, set)

_RANKS: Final = {"send": "dest", "recv": "source"}
"""By operation: the argument that :attr:`Call.root` is. Default: root_rank."""


def shown(value: object) -> str:
    """The value on one line of limited length."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def not_a_tensor(expected: str, value: object, convert: str) -> TypeError:
    """The error for a value that is not a tensor. ``expected``: what is, with its article; ``convert``: the function of
    the framework that makes one."""
    remedy = next((text for name, text in _CONVERSIONS if hasattr(value, name)), "")
    if isinstance(value, _OBJECTS):
        remedy = "use broadcast_object or allgather_object for objects"
    elif isinstance(value, type) or callable(value):
        remedy = ""
    kind = type(value).__name__
    return TypeError(
        f"expected {expected}, got {kind}{remedy and '; ' + remedy.format(convert=convert)}"
    )


def check_mask(value: object) -> None:
    """Raises TypeError for a masked array of NumPy, whose mask the operations would lose."""
    masked: Any = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise TypeError(
            "expected an array, got a masked array, whose mask would be lost; pass x.filled(value), and the mask "
            "np.ma.getmaskarray(x) in an operation of its own"
        )


def checked(spec: OpSpec, call: Call) -> Call:
    """The call with numbers of Python. Raises TypeError or ValueError, which name the argument, for options of a wrong
    kind."""
    return call._replace(
        name=spec.checked_name(call.name),
        root=converted(spec.name, _RANKS.get(spec.name, "root_rank"), call.root, _integer),
        prescale=converted(spec.name, "prescale_factor", call.prescale, number),
        postscale=converted(spec.name, "postscale_factor", call.postscale, number),
        tag=converted(spec.name, "tag", call.tag, _integer),
    )


def converted(caller: str, argument: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    """An argument of a call as a number of Python. Raises TypeError or ValueError, which name it."""
    kind = "an integer" if convert is _integer else "a number"
    try:
        return convert(value)
    except OverflowError:
        raise ValueError(f"{caller}: {argument}={shown(value)} is too large") from None
    except Exception:  # whatever the conversion of a foreign object raises
        raise TypeError(f"{caller}: {argument}= takes {kind}, got {shown(value)}") from None


def _integer(value: Any) -> int:
    index = operator.index(value)
    if not -(2**63) <= index < 2**63:
        raise OverflowError
    return index


def number(value: Any) -> float:
    if isinstance(value, (str, bytes, complex)):
        raise TypeError
    return float(value)
