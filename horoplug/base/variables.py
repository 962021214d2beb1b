"""How environment variables are described and read. The table of them is :class:`horoplug.base.config.Config`.

``HOROPLUG_X`` takes precedence over ``HOROVOD_X``. An empty value counts as unset. A wrong value raises ValueError with
one line that names the variable, the value and the allowed values."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
import signal
from collections.abc import Callable, Mapping
from typing import Any

SECRET_BYTES = 32
MAX_STREAMS = 64


# ---- parsers: text -> value; their ValueErrors name the allowed values -----------------------------------------------


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    allowed = f"a whole number from {low}" + ("" if high is None else f" to {high}")

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(allowed) from None
        if value < low or (high is not None and value > high):
            raise ValueError(allowed)
        return value

    return parse


def _number(text: str, allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(allowed) from None
    if not math.isfinite(value):
        raise ValueError(allowed)
    return value


def signal_number(text: str) -> int:
    name = text.upper().removeprefix("SIG")
    number = {each.name.removeprefix("SIG"): each.value for each in signal.Signals}.get(name)
    if number is None:
        raise ValueError("the name of a signal, such as SIGUSR1")
    return number


def seconds(text: str) -> float:
    allowed = "a positive number of seconds"
    value = _number(text, allowed)
    if value <= 0:
        raise ValueError(allowed)
    return value


def seconds_or_never(text: str) -> float:
    """0 means never, and so do negative numbers."""
    return max(_number(text, "a number of seconds (0: never)"), 0.0)


def seconds_or_zero(text: str) -> float:
    allowed = "a number of seconds (0: never)"
    value = _number(text, allowed)
    if value < 0:
        raise ValueError(allowed)
    return value


def flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("0 or 1")


def one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return text.strip().lower()

    return parse


def text(value: str) -> str:
    return value.strip()


def cores(text: str) -> tuple[int, ...]:
    try:
        return tuple(integer(0)(part) for part in text.split(","))
    except ValueError:
        raise ValueError("CPU numbers separated by commas") from None


def parse_secret(text: str) -> bytes:
    """The 32 bytes of a job's secret from 64 hex digits or from base64. Raises ValueError, whose text omits the
    value."""
    text = text.strip()
    if len(text) == 2 * SECRET_BYTES:
        try:
            return bytes.fromhex(text)
        except ValueError:
            pass
    try:
        secret = base64.b64decode(text, validate=True)
    except binascii.Error:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ValueError("32 bytes as hex or base64")
    return secret


# ---- variables -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Variable:
    """An environment variable.

    ``name``: without prefix; ``parse``: converts the text, or raises a ValueError with the allowed values; ``doc``:
    what the variable does, in Markdown for docs/configuration.md, empty if settings.def says it; ``field``: the field
    of :class:`horoplug.base.config.Config` that it fills."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    doc: str
    aliases: tuple[str, ...] = ()  # further full names, after the two prefixed ones in precedence
    private: bool = False  # the value must not appear in messages
    field: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Full names, in order of precedence."""
        return (f"HOROPLUG_{self.name}", f"HOROVOD_{self.name}", *self.aliases)


def variable(
    name: str,
    parse: Callable[[str], Any],
    default: Any,
    doc: str = "",
    *,
    aliases: tuple[str, ...] = (),
    private: bool = False,
) -> Any:
    """A field of a dataclass that a variable fills. The parameters are the attributes of :class:`Variable`."""
    row = Variable(name, parse, default, doc, aliases, private)
    return dataclasses.field(default=default, repr=not private, metadata={Variable: row})


def variables_of(settings: type) -> tuple[Variable, ...]:
    """The variables that fill the fields of a dataclass."""
    fields = [field for field in dataclasses.fields(settings) if Variable in field.metadata]
    return tuple(
        dataclasses.replace(field.metadata[Variable], field=field.name) for field in fields
    )


# Variables of Horovod without a counterpart. Setting them must not break a job.
IGNORED: tuple[str, ...] = (
    "ADASUM_MPI_CHUNK_SIZE",
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    "BATCH_D2D_MEMCOPIES",
    "CCL_CACHE",
    "CYCLE_TIME",
    "DISABLE_NVTX_RANGES",
    "ENABLE_ASYNC_COMPLETION",
    "ENABLE_XLA_OPS",
    "HIERARCHICAL_ALLGATHER",
    "MPI_THREADS_DISABLE",
    "NUM_NCCL_STREAMS",
    "TORUS_ALLREDUCE",
)
# Settings that are not tuned if their variable is set, and the core's name for each (_native.Tunable).
TUNABLE: dict[str, str] = {
    "PLAN_BUCKET_SIZE": "BUCKETS",
    "NUM_STREAMS": "LANES",
    "ALGORITHM": "ALGORITHMS",
}
# Connections per pair of ranks with AUTOTUNE=1, so that tuning can choose how many to use.
TUNED_STREAMS = 4


# ---- reading --------------------------------------------------------------------------------------------------------


def argument(name: str, value: Any, parse: Callable[[str], Any]) -> Any:
    """The value of an argument of Python. Raises ValueError with one line of text, as :func:`read` does."""
    try:
        return parse(str(value))
    except ValueError as error:
        raise ValueError(f"{name}={value!r} is wrong: it must be {error}") from None


def name_in_use(variable: Variable, env: Mapping[str, str]) -> str | None:
    """The full name under which a variable is set, by precedence; None if it is unset."""
    return next((name for name in variable.names if env.get(name, "").strip()), None)


def read(variable: Variable, env: Mapping[str, str]) -> Any:
    """The value of a variable in an environment, or its default. Raises ValueError with one line of text."""
    name = name_in_use(variable, env)
    if name is None:
        return variable.default
    text = env[name]
    try:
        return variable.parse(text)
    except ValueError as error:
        shown = "(not shown)" if variable.private else repr(text)
        raise ValueError(f"{name}={shown} is wrong: it must be {error}") from None
