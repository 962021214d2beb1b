"""Counts the checks of a program by name: a file with those that passed and failed for each rank.

check = Report("operations", rank)
with check("broadcast"):
    assert ...
check.finish()
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horoplug


class Report:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._passed: list[str] = []
        self._failed: dict[str, str] = {}
        with self("horoplug is the installed package"):
            assert Path(horoplug.__file__).is_relative_to(sys.prefix), horoplug.__file__

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """One check; what it raises is its failure, and the program goes on."""
        assert name not in self._passed, f"two checks with one name: {name}"
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._failed[name] = f"{type(error).__name__}: {error}"[:600]
        else:
            self._passed.append(name)

    def write(self) -> None:
        folder = Path(os.environ["HOROPLUG_VERSIONS_RESULTS"])
        found = {"passed": self._passed, "failed": self._failed}
        (folder / f"{self._rank}.json").write_text(json.dumps(found))

    def finish(self) -> None:
        """Writes the file; ends the program with an error if a check has failed."""
        self.write()
        if self._failed:
            sys.exit(f"{len(self._failed)} checks failed: {', '.join(self._failed)}")


def error_of(kind: type[BaseException], function: Callable[..., Any], *args: Any) -> Any:
    """What the function raises, which must be of that kind."""
    try:
        function(*args)
    except kind as error:
        return error
    raise AssertionError(f"{function.__name__} raises nothing")
