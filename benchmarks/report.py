"""Makes one HTML page, with plots and tables, of the JSON files that benchmarks have written.

    python benchmarks/report.py build/bench -o build/bench/index.html

Everything on the page comes from these files. Records with the same title share a section and its plots: where several
of them have the same line, as horoplug's beside several peers, the median of their values is drawn.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

# In this order; benchmarks that are not listed come after.
ORDER = ("allreduce", "gradients", "train", "network", "idle", "control_plane", "torch_hooks")
OWN = "horoplug"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
MARKERS = "osD^vP*X"

Record = dict[str, Any]


def load(folder: Path) -> list[Record]:
    """SystemExit if there is none."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    records = [record for record in records if record.get("format") == 1 and record["rows"]]
    if not records:
        raise SystemExit(f"no record of a benchmark in {folder}")
    return records


def sections(records: Iterable[Record]) -> list[list[Record]]:
    """The records by benchmark and title."""
    by_title: dict[tuple[int, str, str], list[Record]] = defaultdict(list)
    for record in records:
        name = record["benchmark"]
        place = ORDER.index(name) if name in ORDER else len(ORDER)
        by_title[place, name, record["title"]].append(record)
    return [by_title[key] for key in sorted(by_title)]


# ---- plots -----------------------------------------------------------------------------------------------------------


def points(records: list[Record], plot: dict[str, str]) -> dict[str, dict[Any, float]]:
    """For each line, y by x, in the order of the rows."""
    values: dict[str, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for row in record["rows"]:
            if row[plot["y"]] is not None:
                values[row[plot["line"]]][row[plot["x"]]].append(row[plot["y"]])
    lines = {
        line: {x: statistics.median(y) for x, y in by_x.items()} for line, by_x in values.items()
    }
    # Horoplug first, for its colour to be the same everywhere.
    return dict(sorted(lines.items(), key=lambda item: not item[0].startswith(OWN)))


def label(record: Record, column: str) -> str:
    known = record["columns"][column]
    return f"{known['title']} ({known['unit']})" if known["unit"] else known["title"]


def draw(records: list[Record], plot: dict[str, str]) -> str:
    """An SVG element; empty if there is nothing to draw."""
    lines = points(records, plot)
    values = [y for by_x in lines.values() for y in by_x.values()]
    if not values:
        return ""
    figure, axes = pyplot.subplots(figsize=(8.5, 4.6), layout="constrained")
    if plot["kind"] == "lines":
        for number, (line, by_x) in enumerate(lines.items()):
            positive = {x: y for x, y in by_x.items() if y > 0}
            style: dict[str, Any] = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKERS[number % 8],
            }
            axes.plot(list(positive), list(positive.values()), label=line, markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        if records[0]["columns"][plot["x"]]["unit"] == "B":
            axes.xaxis.set_major_formatter(lambda x, _: byte_text(x))
    else:
        draw_bars(axes, lines)
        if min(values) > 0 and max(values) / min(values) > 30:
            axes.set_yscale("log")
            axes.set_ylim(bottom=min(values) / 2)
    axes.set(xlabel=label(records[0], plot["x"]), ylabel=label(records[0], plot["y"]))
    axes.grid(True, axis="both" if plot["kind"] == "lines" else "y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    # Text stays text, so that the page is small and can be searched; names within the page are unique.
    salt = records[0]["title"] + plot["y"]
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def byte_text(count: float) -> str:
    """In the largest binary unit that is not too large."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def draw_bars(axes: Any, lines: dict[str, dict[Any, float]]) -> None:
    groups = list(dict.fromkeys(x for by_x in lines.values() for x in by_x))
    width = 0.8 / len(lines)
    for number, (line, by_x) in enumerate(lines.items()):
        places = [groups.index(x) - 0.4 + (number + 0.5) * width for x in by_x]
        colour = COLOURS[number % len(COLOURS)]
        bars = axes.bar(places, list(by_x.values()), width * 0.92, label=line, color=colour)
        axes.bar_label(bars, fmt=short, fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])


# ---- the page --------------------------------------------------------------------------------------------------------


def cell(record: Record, column: str, value: Any) -> str:
    if value is None:
        return "-"
    return format(value, record["columns"][column]["form"])


def machines(records: list[Record]) -> list[dict[str, str]]:
    """Those that differ; usually one."""
    found: list[dict[str, str]] = []
    for record in records:
        if record["machine"] not in found:
            found.append(record["machine"])
    return found


def span(records: list[Record]) -> tuple[str, str]:
    started = sorted(record["started"] for record in records)
    return started[0], started[-1]


def page(records: list[Record]) -> str:
    template = Path(__file__).with_name("harness") / "report.html.jinja"
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    parts = [
        {
            "title": group[0]["title"][:1].upper() + group[0]["title"][1:],
            "program": f"{group[0]['benchmark']}.py",
            "about": group[0]["about"],
            "plots": [draw(group, plot) for plot in group[0]["plots"]],
            "records": group,
        }
        for group in sections(records)
    ]
    first, last = span(records)
    loads = [value for record in records for value in record["load"].values()]
    return environment.from_string(template.read_text()).render(
        parts=parts,
        machines=machines(records),
        first=first,
        last=last,
        load=(min(loads), max(loads)) if loads else (math.nan, math.nan),
        wrong=sum(record["wrong"] for record in records),
        cell=cell,
        label=label,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of JSON files")
    parser.add_argument("-o", dest="output", type=Path, required=True, help="the HTML file")
    args = parser.parse_args()
    text = page(load(args.folder))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)
    print(f"{args.output}: {len(text) / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
