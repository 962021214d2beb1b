"""How the values of ``horovodrun``'s flags are parsed: :class:`Kind` and its instances."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A kind of value.

    ``parse``: converts the text, or raises argparse.ArgumentTypeError with the accepted values; ``yaml``: the types
    that the value may have in a configuration file."""

    parse: Callable[[str], Any]
    metavar: str
    yaml: tuple[type, ...]
    choices: tuple[str, ...] | None = None


def whole_number(low: int, metavar: str = "N") -> Kind:
    """A whole number that is at least ``low``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"a whole number is wanted, not {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"at least {low} is wanted, not {value}")
        return value

    return Kind(parse, metavar, (int,))


def number(what: str, metavar: str, zero: bool, high: float = math.inf) -> Kind:
    """A number, kept as text since the launcher only forwards it. ``zero``: whether 0 is allowed."""

    def parse(text: str) -> str:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero) or value > high:
            kind = "not negative" if zero else "positive"
            limit = f" up to {high:g}" if high < math.inf else ""
            raise argparse.ArgumentTypeError(f"a {kind} {what}{limit} is wanted, not {text!r}")
        return text

    return Kind(parse, metavar, (int, float))


def cpu_list(text: str) -> str:
    """Parse CPU numbers separated by commas; kept as text."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(
            f"CPU numbers separated by commas are wanted, not {text!r}"
        )
    return text


def variable_names(text: str) -> str:
    """Check names and patterns of variables, separated by commas; kept as text."""
    for part in text.split(","):
        if not re.fullmatch(r"[\w*?\[\]!%.-]+", part.strip()):
            hint = ": the value belongs into the environment" if "=" in part else ""
            raise argparse.ArgumentTypeError(
                f"names of variables are wanted, not {part.strip().partition('=')[0]!r}{hint}"
            )
    return text


def program(text: str) -> tuple[str, ...]:
    """Parse a command with its arguments, quoted as in a shell."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if not words:
        raise argparse.ArgumentTypeError("a command is wanted, such as ssh")
    return tuple(words)


def text(metavar: str) -> Kind:
    """Any text."""
    return Kind(str, metavar, (str,))


SECONDS = number("number of seconds", "S", zero=False)
SECONDS_OR_ZERO = number("number of seconds", "S", zero=True)
SWITCH = Kind(str, "", (bool,))
