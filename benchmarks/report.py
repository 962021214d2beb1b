"""Write a Markdown page with tables and SVG plots from the JSON files that benchmarks have written.

    python benchmarks/report.py build/bench -o build/bench/report.md
    python benchmarks/report.py docs/benchmarks -o docs/benchmarks.md    # redraw from the figures that are kept

Everything on the page comes from these files. The plots go into the folder ``NAME/`` beside the page ``NAME.md``,
together with ``figures.json``: the plotted columns of all records, which is enough to write the same page again.

Records with the same title share a section. Where several of them have the same line, for example horoplug's beside
several peers, the page shows the median of their values.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import summary
from summary import size_text

matplotlib.use("svg")
from matplotlib import pyplot

# In this order; benchmarks that are not listed come after.
ORDER = (
    "allreduce",
    "gradients",
    "train",
    "ddp",
    "network",
    "raw",
    "idle",
    "control_plane",
    "torch_hooks",
)
OWN = "horoplug"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
MARKERS = "osD^vP*X"
FIGURES = "figures.json"
# What of a record is kept in FIGURES, beside the plotted columns.
KEPT = (
    "format",
    "benchmark",
    "title",
    "about",
    "command",
    "machine",
    "started",
    "load",
    "round_trips",
    "plots",
    "wrong",
)

Record = dict[str, Any]


# ---- records ---------------------------------------------------------------------------------------------------------


def load(folder: Path) -> list[Record]:
    """The records of a folder: one per file, or those of its figures.json. SystemExit if there is none."""
    records: list[Record] = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        records += unpacked(found) if path.name == FIGURES else [found]
    records = [record for record in records if record.get("format") == 1 and record["rows"]]
    if not records:
        raise SystemExit(f"no record of a benchmark in {folder}")
    return records


def plotted(record: Record) -> list[str]:
    """The columns that the page shows."""
    if not record["plots"]:
        return list(record["columns"])
    used = {plot[key] for plot in record["plots"] for key in ("x", "y", "line")}
    return [column for column in record["columns"] if column in used]


def rounded(value: Any) -> Any:
    """Four significant digits, and no fraction where there is none."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    value = float(f"{value:.4g}")
    return int(value) if value == int(value) else value


def column(values: list[Any]) -> Any:
    """The values, or an object with the different ones and their numbers if these are strings."""
    if not all(isinstance(value, str) for value in values):
        return values
    names = list(dict.fromkeys(values))
    return {"names": names, "numbers": [names.index(value) for value in values]}


def values_of(column: Any) -> list[Any]:
    """The values of :func:`column`."""
    if isinstance(column, list):
        return column
    return [column["names"][number] for number in column["numbers"]]


def packed(records: Iterable[Record]) -> dict[str, Any]:
    """The records without what the page does not show. Machines and texts that repeat are stored once."""
    machines: list[Any] = []
    abouts: list[str] = []

    def number(known: list[Any], value: Any) -> int:
        if value not in known:
            known.append(value)
        return known.index(value)

    short = []
    for record in records:
        columns = plotted(record)
        kept = {key: record[key] for key in KEPT if key in record}
        kept["machine"] = number(machines, record["machine"])
        kept["about"] = number(abouts, record["about"])
        kept["columns"] = {name: record["columns"][name] for name in columns}
        # By column: values that repeat, such as names, are stored once.
        kept["rows"] = [column([rounded(row[name]) for row in record["rows"]]) for name in columns]
        short.append(kept)
    return {"machines": machines, "abouts": abouts, "records": short}


def unpacked(figures: dict[str, Any]) -> list[Record]:
    """The records of :func:`packed`."""
    return [
        record
        | {
            "machine": figures["machines"][record["machine"]],
            "about": figures["abouts"][record["about"]],
            "rows": [
                dict(zip(record["columns"], row, strict=True))
                for row in zip(*map(values_of, record["rows"]), strict=True)
            ],
        }
        for record in figures["records"]
    ]


def sections(records: Iterable[Record]) -> list[list[Record]]:
    """The records by benchmark and title."""
    by_title: dict[tuple[int, str, str], list[Record]] = defaultdict(list)
    for record in records:
        name = record["benchmark"]
        position = ORDER.index(name) if name in ORDER else len(ORDER)
        by_title[position, name, record["title"]].append(record)
    return [by_title[key] for key in sorted(by_title)]


def lines_of(records: list[Record], plot: dict[str, str]) -> dict[str, dict[Any, float]]:
    """For each line, y by x, in the order of the rows."""
    lines = summary.medians(records, plot["line"], plot["x"], plot["y"])
    # Horoplug first, so that it has the same colour everywhere.
    return dict(sorted(lines.items(), key=lambda item: not item[0].startswith(OWN)))


def label(record: Record, column: str) -> str:
    known = record["columns"][column]
    return f"{known['title']} ({known['unit']})" if known["unit"] else str(known["title"])


# ---- plots -----------------------------------------------------------------------------------------------------------


def draw(records: list[Record], plot: dict[str, str]) -> str:
    """An SVG document; empty if there is nothing to draw."""
    lines = lines_of(records, plot)
    values = [y for by_x in lines.values() for y in by_x.values()]
    if not values:
        return ""
    figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
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
        axes.minorticks_off()
        if records[0]["columns"][plot["x"]]["unit"] == "B":
            axes.xaxis.set_major_formatter(lambda x, _: size_text(x))
    else:
        draw_bars(axes, lines)
        if min(values) > 0 and max(values) / min(values) > 30:
            axes.set_yscale("log")
            axes.set_ylim(bottom=min(values) / 2)
    axes.set(xlabel=label(records[0], plot["x"]), ylabel=label(records[0], plot["y"]))
    axes.set_title(heading(records[0]), fontsize="medium")
    axes.grid(True, axis="both" if plot["kind"] == "lines" else "y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    # Text stays text, so that the file is small and can be searched. The same figures give the same file.
    salt = records[0]["title"] + plot["y"]
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    svg = text.getvalue()
    svg = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", svg[svg.index("<svg") :])
    return re.sub(r"(\d\.\d)\d+", r"\1", re.sub(r"^ +", "", svg, flags=re.MULTILINE))


def short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def draw_bars(axes: Any, lines: dict[str, dict[Any, float]]) -> None:
    groups = list(dict.fromkeys(x for by_x in lines.values() for x in by_x))
    width = 0.8 / len(lines)
    for number, (line, by_x) in enumerate(lines.items()):
        centres = [groups.index(x) - 0.4 + (number + 0.5) * width for x in by_x]
        colour = COLOURS[number % len(COLOURS)]
        bars = axes.bar(centres, list(by_x.values()), width * 0.92, label=line, color=colour)
        axes.bar_label(bars, fmt=short, fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])


# ---- the page --------------------------------------------------------------------------------------------------------


def heading(record: Record) -> str:
    title = str(record["title"])
    return title[:1].upper() + title[1:]


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def escaped(value: Any) -> str:
    """Text of a table's cell."""
    return re.sub(r"([|<>*_\\])", r"\\\1", str(value))


def table(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> list[str]:
    titles = [escaped(title) for title in header]
    text = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    return text + ["| " + " | ".join(escaped(cell) for cell in row) + " |" for row in rows]


def pivot(records: list[Record], plot: dict[str, str]) -> list[str]:
    """A table of the figures of one plot, longer than it is wide: x by line, or line by x."""
    lines = lines_of(records, plot)
    columns = records[0]["columns"]
    by_x = {
        x: size_text(x) if columns[plot["x"]]["unit"] == "B" else x
        for y in lines.values()
        for x in y
    }
    texts = {(line, x): short(y) for line, values in lines.items() for x, y in values.items()}
    if len(lines) > len(by_x):
        rows = [[line, *(texts.get((line, x), "") for x in by_x)] for line in lines]
        return table([columns[plot["line"]]["title"], *by_x.values()], rows)
    rows = [[title, *(texts.get((line, x), "") for line in lines)] for x, title in by_x.items()]
    return table([columns[plot["x"]]["title"], *lines], rows)


def picture(records: list[Record], drawings: dict[str, str]) -> list[str]:
    """The drawing of a section's first plot, which is added to ``drawings``: SVG by file name."""
    first = records[0]
    for plot in first["plots"][:1]:
        if svg := draw(records, plot):
            name = f"{slug(first['title'])}.svg"
            drawings[name] = svg
            return [f"![{heading(first)}: {label(first, plot['y'])}]({{folder}}/{name})", ""]
    return []


def measured(record: Record) -> str:
    """The command, and the time between two cores meanwhile, which older records do not have."""
    trips = record.get("round_trips")
    if not trips:
        return str(record["command"])
    return f"{record['command']}  # cores: {min(trips):.0f} to {max(trips):.0f} ns"


def section(records: list[Record], drawings: dict[str, str]) -> list[str]:
    """The text of a section. Adds its drawing to ``drawings``: SVG by file name."""
    first = records[0]
    text = [f"## {heading(first)}", "", str(first["about"]), ""]
    if not first["title"].startswith(summary.PICTURES):
        text += picture(records, drawings)
    for plot in first["plots"]:
        text += [f"{label(first, plot['y']).capitalize()}:", "", *pivot(records, plot), ""]
    if not first["plots"]:
        columns = list(first["columns"])
        rows = (
            [short(v) if isinstance(v, float) else v for v in (row[c] for c in columns)]
            for record in records
            for row in record["rows"]
        )
        text += [*table((label(first, column) for column in columns), rows), ""]
    text += ["Measured by:", "", *(f"    {measured(record)}" for record in records), ""]
    return text


def machines(records: list[Record]) -> list[dict[str, str]]:
    """The different machines and versions; usually one."""
    merged: list[dict[str, str]] = []
    for record in records:
        for known in merged:
            shared = known.keys() & record["machine"].keys()
            if all(known[key] == record["machine"][key] for key in shared):
                known |= record["machine"]
                break
        else:
            merged.append(dict(record["machine"]))
    return merged


def page(records: list[Record], drawings: dict[str, str]) -> str:
    started = sorted(record["started"] for record in records)
    loads = [value for record in records for value in record["load"].values()] or [math.nan]
    groups = sections(records)
    text = ["# Benchmarks", ""]
    for title in summary.PICTURES:
        for group in groups:
            if group[0]["title"].startswith(title):
                text += picture(group, drawings)
    text += [f"- {line}" for line in summary.lines(records)]
    text += [
        "",
        "The programs in `benchmarks/` measured these figures beside other libraries, in alternating blocks of the",
        "same run. Times are medians, as the slowest rank sees them. A ratio is a library's time over the time of",
        "horoplug in the same run: above 1, horoplug is faster. Compare ratios; absolute times of different runs",
        "differ with the load of the machine. `make bench-report` repeats all of it and writes this page;",
        "`benchmarks/README.md` explains every program and column.",
        "",
        f"Runs from {started[0]} to {started[-1]}; load average before and after them from {min(loads):.2f} to "
        f"{max(loads):.2f},",
        f"including the benchmarks' own processes. Wrong results: {sum(record['wrong'] for record in records)}.",
    ]
    if any(record.get("round_trips") for record in records):
        text += [
            "`cores` is how long a cache line took from one core to another and back before, during and after a run:",
            "several times as long while a virtual machine has cores that share no cache. Compare runs in which it is",
            "alike.",
        ]
    text += [""]
    for machine in machines(records):
        text += [*table(["machine", ""], machine.items()), ""]
    for group in groups:
        text += section(group, drawings)
    return "\n".join(text).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with the JSON files")
    parser.add_argument("-o", dest="output", type=Path, required=True, help="the Markdown file")
    args = parser.parse_args()
    figures = packed(load(args.folder))
    records = unpacked(figures)  # so that the page is the same when it is written from the figures
    drawings: dict[str, str] = {}
    text = page(records, drawings).replace("{folder}", args.output.stem)
    folder = args.output.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for name, svg in drawings.items():
        (folder / name).write_text(svg)
    (folder / FIGURES).write_text(json.dumps(figures, separators=(",", ":")) + "\n")
    args.output.write_text(text)
    print(f"{args.output}: {len(text) / 1e3:.0f} kB, {len(drawings)} plots in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
