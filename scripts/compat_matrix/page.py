"""Writes docs/versions.md from the table and the results. A row without results keeps its line, if its versions are
those of the table."""

from itertools import groupby

from scripts.compat_matrix.environment import ROOT
from scripts.compat_matrix.programs import PROGRAMS
from scripts.compat_matrix.results import known
from scripts.compat_matrix.rows import ROWS, Row

PAGE = ROOT / "docs" / "versions.md"
NOT_RUN = "not yet run"
HEAD = """\
# Tested versions

`make compat-matrix` writes this page. For each row it makes a new environment, installs the
[wheel](installing.md#wheels-for-other-machines) of horoplug and the versions listed here, and runs programs outside of
the checkout on two and three ranks:

- **operations**: every operation, with all dtypes and reductions of the framework, compared with NumPy's result;
- **optimizer**: training on two ranks gives the same bits on both, and what one process gives with the data of both;
- **torch.distributed**: collectives, DistributedDataParallel and `fully_shard` on the backend `horoplug`;
- **jobs**: functions, trainers and estimators on a cluster of Ray or Spark on one machine;
- **example**: the program of `examples/` for the framework;
- **killed rank**: `kill -9` of a rank. All others raise `HorovodInternalError` (TensorFlow: `UnknownError`), which
  names it, and the launcher's exit code is not 0.

A number is that of the checks that passed on all ranks. Frameworks compute on processors here, with PyPI's builds;
[Tested on GPUs](gpu-results.md) has the others.
"""


def _cell(result: dict | None) -> str:
    if result is None:
        return NOT_RUN
    failed = len(result["failed"])
    return f"{len(result['passed'])}" + (f", **{failed} failed**" if failed else "")


def _line_before(row: Row) -> str:
    """The line of the page as it is; empty if there is none with these versions."""
    pinned = dict(each.split("==") for each in row.requires)
    versions = [f"{name} {pinned[name]}" for name in row.shown if name in pinned]
    for line in PAGE.read_text().splitlines():
        words = set(line.replace("|", ",").split(", "))
        if line.startswith(f"| {row.name} |") and {each.strip() for each in words} >= {*versions}:
            return line if line.count("|") == 5 + len(PROGRAMS[row.programs]) else ""
    return ""


def _line(row: Row) -> str:
    found = known(row)
    names = [program.name for program in PROGRAMS[row.programs]]
    if found is None and (line := _line_before(row)):
        return line
    if not found or "versions" not in found:
        versions, date = ", ".join(row.requires), ""
        python, cells = f"3.{row.python[3:]}", [NOT_RUN] * len(names)
    else:
        installed = found["versions"]
        shown = [name for name in (*row.shown, "numpy") if name in installed]
        versions = ", ".join(f"{name} {installed[name]}" for name in shown)
        python, date = found["python"], found["date"]
        cells = [_cell(found["programs"].get(name)) for name in names]
    return "| " + " | ".join([row.name, versions, python, *cells, date]) + " |"


def text() -> str:
    parts = [HEAD]
    for group, rows in groupby(ROWS, key=lambda row: row.group):
        rows = list(rows)
        names = [program.name for program in PROGRAMS[rows[0].programs]]
        header = ["environment", "versions", "Python", *names, "date"]
        lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        parts.append("\n".join([f"## {group}", "", *lines, *map(_line, rows), ""]))
    return "\n".join(parts)


def write() -> None:
    PAGE.write_text(text())
