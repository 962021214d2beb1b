"""The first lines of a report: where horoplug wins and where it loses, from the figures of the report."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

Record = dict[str, Any]
Ratios = dict[Any, dict[str, float]]
"""By size or model, and by peer: the peer's time over horoplug's in the same run."""

PICTURES = ("allreduce, float32, 2 ranks", "training, 2 ranks")
"""How the titles of the sections begin whose plots stand above all others."""

TIE = 0.97  # of two medians: neither library is the faster one
SMALL = 8 << 10
WHY_SMALL = (
    "A small operation also pays for its name, its order among others, its time limit and the error that would name a "
    "rank (docs/design/small-operations.md)."
)
WHY_OTHERS = (
    "A broadcast or send of MPI may return before the other ranks have come; an operation of horoplug ends when they "
    "have taken part, so that it can name the one that does not come."
)


def lines(records: list[Record]) -> Iterator[str]:
    """One sentence or two for each benchmark that is among the records."""
    for ranks in (2, 4, 8):
        found = of(records, "allreduce", f"allreduce, float32, {ranks} ranks on 1 host")
        if found:
            yield f"**Allreduce, {ranks} ranks on a host:** {by_size(ratios(found, 'size', 'library'))}"
    if found := of(records, "allreduce", "", but="allreduce,"):
        yield f"**Other operations:** {other_operations(found)}"
    if found := of(records, "gradients", "gradients, 2 ranks"):
        yield f"**The gradients of a model:** {gradients(found)}"
    if found := of(records, "train", "training, 2 ranks"):
        yield f"**Training, 2 ranks:** {training(found)}"
    for record in of(records, "network", "allreduce")[:2]:
        where = record["title"].partition("namespaces, ")[2]
        yield f"**Between hosts, {where}:** {by_size(ratios([record], 'size', 'library'))}"


def of(records: Iterable[Record], benchmark: str, title: str, but: str = "\0") -> list[Record]:
    """The records of a benchmark whose titles begin like this, but not like ``but``."""
    return [
        record
        for record in records
        if record["benchmark"] == benchmark
        and record["title"].startswith(title)
        and not record["title"].startswith(but)
    ]


def medians(
    records: Iterable[Record], first: str, second: str, value: str
) -> dict[Any, dict[Any, float]]:
    """The medians over the records of the column ``value``, by the columns ``first`` and ``second``."""
    values: dict[Any, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for row in record["rows"]:
            if row[value] is not None:
                values[row[first]][row[second]].append(row[value])
    return {
        one: {other: statistics.median(found) for other, found in by_other.items()}
        for one, by_other in values.items()
    }


def ratios(records: Iterable[Record], x: str, line: str) -> Ratios:
    """Those of the peers, in the order of x."""
    found: Ratios = {}
    for at, by_line in sorted(medians(records, x, line, "ratio").items()):
        peers = {peer: ratio for peer, ratio in by_line.items() if not peer.startswith("horoplug")}
        if peers:
            found[at] = peers
    return found


def by_size(found: Ratios) -> str:
    """Where horoplug is the fastest, and by how much it is not elsewhere."""
    fastest = {
        size: min(by_peer.items(), key=lambda item: item[1]) for size, by_peer in found.items()
    }
    won = {size: ratio for size, (_, ratio) in fastest.items() if ratio >= TIE}
    text = []
    if won:
        best = max(won, key=lambda size: won[size])
        text.append(
            f"horoplug is the fastest, or within 3 % of it, at {listed(won, fastest)}; "
            f"at {size_text(best)} the next one takes {won[best]:.1f} times as long."
        )
    for peer in dict.fromkeys(peer for peer, ratio in fastest.values() if ratio < TIE):
        lost = {
            size: 1 / ratio for size, (who, ratio) in fastest.items() if who == peer and ratio < TIE
        }
        text.append(
            f"At {listed(lost, fastest)} {peer} is the fastest, and horoplug takes {span(lost.values())} times as long."
        )
    if any(size < SMALL and ratio < TIE for size, (_, ratio) in fastest.items()):
        text.append(WHY_SMALL)
    return " ".join(text)


def other_operations(records: list[Record]) -> str:
    by_title: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_title[record["title"]].append(record)
    won = total = 0
    worst: tuple[float, str] = (1.0, "")
    for title, some in by_title.items():
        for size, by_peer in ratios(some, "size", "library").items():
            peer, ratio = min(by_peer.items(), key=lambda item: item[1])
            total, won = total + 1, won + (ratio >= TIE)
            operation, _, rest = title.partition(", float32, ")
            where = f"{operation} of {size_text(size)}, {rest.split(' on ')[0]}, beside {peer}"
            worst = min(worst, (ratio, where))
    text = f"horoplug is the fastest, or within 3 % of it, in {won} of {total} rows."
    if worst[1]:
        text += (
            f" The worst one: it takes {1 / worst[0]:.1f} times as long ({worst[1]}). {WHY_OTHERS}"
        )
    return text


def gradients(records: list[Record]) -> str:
    """Beside MPI's bare calls, which copy and average nothing, and gloo's buckets."""
    text = []
    for model, by_peer in ratios(records, "model", "variant").items():
        bare = [ratio for peer, ratio in by_peer.items() if peer.endswith("bare")]
        parts = []
        if bare:
            parts.append(
                f"takes {1 / min(bare):.2f} times as long as the bare calls of the fastest MPI"
            )
        if "torch-gloo, buckets" in by_peer:
            parts.append(
                f"is {by_peer['torch-gloo, buckets']:.1f} times as fast as gloo in the buckets of DDP"
            )
        if parts:
            text.append(f"for {model}, horoplug {' and '.join(parts)}")
    return "; ".join(text) + "."


def training(records: list[Record]) -> str:
    text = []
    for model, of in medians(records, "model", "variant", "efficiency").items():
        words = [f"{model} reaches {max(of['horoplug'], of.get('horoplug, views', 0)):.0f} %"]
        if "torch-gloo" in of:
            words.append(f"DDP on gloo {of['torch-gloo']:.0f} %")
        if "apart" in of:
            words.append(f"processes that reduce nothing {of['apart']:.0f} %")
        text.append(", ".join(words))
    return "of what as many processes alone would do, the " + "; the ".join(text) + "."


# ---- words -----------------------------------------------------------------------------------------------------------


def span(values: Iterable[float]) -> str:
    """``1.2`` or ``1.2 to 2.3``."""
    low, high = min(found := [*values]), max(found)
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"


def listed(sizes: Iterable[int], known: Iterable[int]) -> str:
    """The sizes, neighbours among the known ones together: ``4 B to 1 KiB and 64 MiB``."""
    order = [*known]
    groups: list[list[int]] = []
    for size in sizes:
        if groups and order.index(size) == order.index(groups[-1][-1]) + 1:
            groups[-1].append(size)
        else:
            groups.append([size])
    words = [
        size_text(group[0])
        if len(group) == 1
        else f"{size_text(group[0])} to {size_text(group[-1])}"
        for group in groups
    ]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def size_text(count: float) -> str:
    """In the largest binary unit that is not too large."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
