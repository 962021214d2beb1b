"""The output of a benchmark: a table while it runs, and a JSON file in a common format, which ``report.py`` reads.

A JSON file is one object: ``format``, ``benchmark``, ``title``, ``about``, ``command``, ``ranks``, ``options``,
``machine``, ``started``, ``columns`` (title, unit and form by name), ``plots``, ``load`` (before and after),
``round_trips`` (nanoseconds between two cores, before, perhaps between the rows, and after), ``notes``
(sentences that were made from the rows), ``wrong`` (results that were not as expected; a benchmark that has any ends
with status 1) and ``rows`` (a value or null for every column).
"""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import machine
from harness.peers import Peer

FORMAT = 1


class Column(NamedTuple):
    title: str
    unit: str = ""
    form: str = ""  # as in format()
    width: int = 9


class Plot(NamedTuple):
    """Columns to draw: a line through ``x`` and ``y`` for each ``line``, on logarithmic axes; or bars (``kind``)."""

    kind: str
    x: str
    y: str
    line: str


class Record:
    """Prints on the first rank only. The other ranks use it in the same way."""

    def __init__(
        self,
        benchmark: str,
        title: str,
        about: str,
        columns: Mapping[str, Column],
        plots: Sequence[Plot],
        *,
        ranks: int,
        options: Mapping[str, Any],
        peers: Sequence[Peer] = (),
        speaks: bool = True,
    ) -> None:
        self.columns = columns
        self.rows: list[dict[str, Any]] = []
        self.speaks = speaks
        self.wrong = 0
        described = machine.describe()
        self.head: dict[str, Any] = {
            "format": FORMAT,
            "benchmark": benchmark,
            "title": title,
            "about": " ".join(about.split()),
            "command": _command(benchmark, ranks),
            "ranks": ranks,
            "options": {name: value for name, value in options.items() if value is not None},
            "machine": described,
            "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "columns": {
                name: {"title": c.title, "unit": c.unit, "form": c.form}
                for name, c in columns.items()
            },
            "plots": [plot._asdict() for plot in plots],
        }
        self.notes: list[str] = []
        self.load = {"before": machine.load()}
        self.round_trips: list[float] = []
        trip = self.measure_cores()
        self._say(f"# {title}")
        for peer in peers:
            self.version(peer)
        where = ", ".join(f"{name} {value}" for name, value in described.items())
        between = "" if trip is None else f"; {trip:.0f} ns between two cores and back"
        self._say(f"# {where}; load {self.load['before']:.2f}{between}")
        self._say("#" + " ".join(f"{c.title:>{c.width}}" for c in columns.values()))
        units = [f"({c.unit})" if c.unit else "" for c in columns.values()]
        line = zip(units, columns.values(), strict=True)
        self._say("#" + " ".join(f"{unit:>{c.width}}" for unit, c in line))

    def measure_cores(self) -> float | None:
        """See :func:`machine.round_trip`. The first rank measures; the others should be asleep meanwhile."""
        trip = machine.round_trip() if self.speaks else None
        self.round_trips += [] if trip is None else [trip]
        return trip

    def row(self, **values: Any) -> None:
        """Add a row; missing columns are null. ``wrong``: the number of wrong results."""
        unknown = values.keys() - self.columns.keys()
        if unknown:
            raise TypeError(f"no such columns: {unknown}")
        row = {name: values.get(name) for name in self.columns}
        self.rows.append(row)
        self.wrong += row.get("wrong") or 0
        cells = [
            f"{'-' if row[name] is None else format(row[name], c.form):>{c.width}}"
            for name, c in self.columns.items()
        ]
        self._say(" " + " ".join(cells))

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)
        self._say(f"# {sentence}")

    def version(self, peer: Peer) -> None:
        self.note(f"{peer.name}: {peer.version}")

    def end(self, path: str | None) -> int:
        """Write the JSON file, if one was requested. Returns the exit status."""
        self.load["after"] = machine.load()
        self.measure_cores()
        if "wrong" in self.columns:
            self.note(f"wrong results: {self.wrong}")
        if self.speaks and path:
            rest = {
                "load": self.load,
                "round_trips": self.round_trips,
                "notes": self.notes,
                "wrong": self.wrong,
                "rows": self.rows,
            }
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(_compact({**self.head, **rest}) + "\n")
        return 1 if self.wrong else 0

    def _say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)


def _compact(record: dict[str, Any]) -> str:
    """JSON with a line for each row, so that files are small and their differences can be read."""
    rows = ",\n ".join(json.dumps(row) for row in record["rows"])
    rest = json.dumps({name: value for name, value in record.items() if name != "rows"}, indent=1)
    return f'{rest[:-2]},\n "rows": [\n {rows}\n]}}'


def _command(benchmark: str, ranks: int) -> str:
    """The command that repeats the benchmark on one machine."""
    words = sys.argv[1:]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    start = ["-np", str(ranks)] if ranks > 1 else []
    return shlex.join(["python", f"benchmarks/{benchmark}.py", *start, *words])
