"""Writes the results of ``make test-gpu`` to docs/gpu-results.md, one row for each test file, and prints the table:
``pytest -p tests.gpu.device.results tests/gpu/device``. Skipped tests do not count."""

import ast
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.harness import ROOT

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import gpu_results  # noqa: E402

HOW = "`make test-gpu`"

_outcomes: dict[str, Counter[str]] = defaultdict(Counter)


def rows() -> dict[str, str]:
    """What each file tests, by the file's name."""
    texts = {path.name: path.read_text() for path in sorted(FOLDER.glob("test_*.py"))}
    docs = {name: ast.get_docstring(ast.parse(text)) or name for name, text in texts.items()}
    return {
        name: doc.split("\n\n")[0].rstrip(".").replace("\n", " ").replace("``", "`")
        for name, doc in docs.items()
    }


def summary(outcomes: Counter[str]) -> str | None:
    """The text for the outcomes of a file; None if no test ran."""
    if not outcomes["passed"] + outcomes["failed"]:
        return None
    return ", ".join(
        f"{outcomes[name]} {name}" for name in ("failed", "passed", "skipped") if outcomes[name]
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[Path(report.location[0]).name][report.outcome] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    what = rows()
    found = {what[name]: text for name in what if (text := summary(_outcomes[name]))}
    if not found:
        return
    page = gpu_results.updated(
        gpu_results.PAGE.read_text(), HOW, [*what.values()], gpu_results.describe(), found
    )
    gpu_results.PAGE.write_text(page)
    terminalreporter.write(page)
