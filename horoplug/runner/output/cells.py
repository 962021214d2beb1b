"""Cuts a line of output to the width of a terminal. A longer one would be wrapped, and a carriage return goes back to
the beginning of its last row only, so that each redraw would leave a row behind."""

from __future__ import annotations

import re
import unicodedata

# Control sequences, such as those for colours, take no room. (ECMA-48, 5.4.)
_PIECES = re.compile(r"(\x1b\[[0-?]*[ -/]*[@-~])")
_PLAIN = "\x1b[0m"


def fit(line: bytes, columns: int) -> bytes:
    """The beginning of a line that leaves the last of ``columns`` cells free; all of it if they are 0, which means that
    the width is not known. No colour goes on after a part."""
    room = columns - 1
    if columns <= 0 or len(line) <= room:
        return line
    shown, is_cut = [], False
    for piece in _PIECES.split(line.decode("utf-8", "replace")):
        if piece.startswith("\x1b["):
            if not is_cut:
                shown.append(piece)
            continue
        for character in piece:
            room -= _cells(character)
            if room < 0:
                is_cut = True
                break
            shown.append(character)
    if is_cut and any(piece.startswith("\x1b[") for piece in shown):
        shown.append(_PLAIN)
    return "".join(shown).encode()


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Cc"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
