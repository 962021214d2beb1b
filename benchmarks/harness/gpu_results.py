"""Updates the table of docs/gpu-results.md, which lists the tests and measurements on GPUs with their commands."""

from __future__ import annotations

import datetime
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).resolve().parent.parent.parent / "docs" / "gpu-results.md"
NOT_YET: Final = "not yet run"


def updated(
    text: str,
    how: str,
    rows: Sequence[str],
    where: str = "",
    found: Mapping[str, str] | None = None,
) -> str:
    """The page ``text``, updated with results.

    ``how``: the command; ``rows``: all its rows, in order; ``where``: the machine that it ran on; ``found``: the
    results by row. Rows of other commands do not change. Rows of this command without a result keep their old result,
    or say that they were not run."""
    found = found or {}
    lines = text.rstrip("\n").split("\n")
    mine = [at for at, line in enumerate(lines) if f"| {how} |" in line]
    others = [line for at, line in enumerate(lines) if at not in mine]
    old = {lines[at].split("|")[1].strip(): lines[at] for at in mine}
    new = [
        f"| {what} | {how} | {where} | {found[what]} |"
        if what in found
        else old.get(what, f"| {what} | {how} | | {NOT_YET} |")
        for what in rows
    ]
    first = mine[0] if mine else len(lines)
    return "\n".join([*others[:first], *new, *others[first:]]) + "\n"


def describe() -> str:
    """Date, GPUs, driver and versions."""
    from horoplug import _native
    from horoplug.common.gpu import files

    capabilities = _native.gpu_capabilities(files()).splitlines()
    # "[X] NCCL 2.30.3 (/path)"
    versions = [line[4:].rpartition(" (")[0] for line in capabilities if line.startswith("[X]")]
    if importlib.util.find_spec("torch"):
        import torch

        versions.append(f"torch {torch.__version__}")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return ", ".join([today, *versions])
