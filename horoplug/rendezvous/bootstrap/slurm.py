"""Parses Slurm's lists: of hosts, ``node[001-003,7]-ib,login1``, and of numbers per host, ``2(x3),1``."""

from __future__ import annotations

import itertools
import re

MAX_HOSTS = 1 << 16
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts(text: str) -> list[str]:
    """The host names in a list, in its order: ``a[08-10]`` is a08, a09, a10.

    Errors: ValueError with a one-line message."""
    names: list[str] = []
    for pattern in _split(text):
        # "rack[1-2]n[1-2]" splits into rack, 1-2, n, 1-2 and an empty part: every second one was in brackets.
        parts = _BRACKETS.split(pattern)
        choices = [_numbers(part, text) if i % 2 else [part] for i, part in enumerate(parts)]
        if not pattern or any(c in part for part in parts for c in "[]"):
            raise _wrong(text)
        names += map("".join, itertools.islice(itertools.product(*choices), MAX_HOSTS + 1))
        if len(names) > MAX_HOSTS:
            raise ValueError(f"Slurm's list of hosts {text[:60]!r} has more than {MAX_HOSTS} hosts")
    return names


def counts(text: str) -> list[int]:
    """One number per host: ``2(x3),1`` is 2, 2, 2, 1. Errors: ValueError with a one-line message."""
    numbers: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None or int(found[2] or 1) > MAX_HOSTS:
            raise ValueError(f"{text!r} is not a Slurm list of tasks per host, like 2(x3),1")
        numbers += [int(found[1])] * int(found[2] or 1)
    return numbers


def _split(text: str) -> list[str]:
    """The list's items; a comma within brackets does not end an item."""
    parts, depth = [""], 0
    for character in text.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _numbers(text: str, whole: str) -> list[str]:
    """The numbers within a pair of brackets; each keeps the width of the first one of its range."""
    numbers: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or not (last if dash else first).isdecimal():
            raise _wrong(whole)
        low, high = int(first), int(last or first)
        if not low <= high < low + MAX_HOSTS:
            raise _wrong(whole)
        numbers += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return numbers


def _wrong(text: str) -> ValueError:
    return ValueError(f"{text[:80]!r} is not a Slurm list of hosts, like node[001-003,7],login1")
