"""Checks the include graph and the type names of the C++ core.

    python scripts/check_layers.py

- A file includes only lower layers, and headers do not form a cycle.
- A namespace has one type of each name, also among types that are local to a file.

Prints one line for each violation and exits with status 1 if there is any. ``make lint`` runs it.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"

# What the engine stands on.
BELOW_ENGINE = {
    "include",
    "base",
    "trace",
    "device/cpu",
    "device/cuda",
    "transport",
    "collectives",
    "controller",
}
# For each layer, the folders and headers that its files may include besides those of their own folder.
# A file's layer is the longest prefix of its path.
ALLOWED: dict[str, set[str]] = {
    "include": set(),
    "base": {"include"},
    "trace": {"base"},
    "device/cpu": {"include", "base"},
    "device/cuda": {"include", "base", "device/cpu"},
    "transport": {"include", "base"},
    "collectives": {"include", "base", "trace", "device/cpu", "device/cuda", "transport"},
    "controller/state": {"include", "base", "collectives/tuning.h"},
    "controller/messages": {"include", "base", "controller/state"},
    "controller/plans": {
        "include",
        "base",
        "collectives/tuning.h",
        "controller/state",
        "controller/messages",
    },
    "controller/stalls": {"include", "base", "controller/state", "controller/messages"},
    "controller": {"include", "base", "collectives/tuning.h"},
    "engine/operations": BELOW_ENGINE,
    "engine/loop": BELOW_ENGINE,
    "engine/execution": {*BELOW_ENGINE, "engine/operations", "engine/options.h"},
    "engine": BELOW_ENGINE,
    # Bindings know the core by its C ABI only.
    "bindings/common": {"include"},
    "bindings/python": {"include", "bindings/common"},
    "bindings/tensorflow": {"include", "bindings/common"},
    "bindings/jax": {"include", "bindings/common"},
}
INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{", re.MULTILINE)
TYPE = re.compile(
    r"^(?:class|struct|enum class|union) (\w+)(?: final)?(?: : [^;{]+)? \{", re.MULTILINE
)


def layer_of(path: str) -> str:
    """The layer that a path relative to ``csrc`` belongs to."""
    fitting = [layer for layer in ALLOWED if path.startswith(layer + "/")]
    if not fitting:
        raise SystemExit(f"csrc/{path} belongs to no layer of {Path(__file__).name}")
    return max(fitting, key=len)


def included(file: Path) -> Iterator[str]:
    """The project's own headers that a file includes, relative to ``csrc``."""
    for name in INCLUDE.findall(file.read_text()):
        for folder in (CSRC, CSRC / "include", file.parent):
            if (folder / name).exists():
                yield str((folder / name).resolve().relative_to(CSRC))
                break


def find_circle(graph: dict[str, list[str]]) -> list[str]:
    """The files of one circle, or an empty list."""
    done: set[str] = set()

    def visit(file: str, path: list[str]) -> list[str]:
        if file in path:
            return [*path[path.index(file) :], file]
        if file in done:
            return []
        for other in graph.get(file, []):
            if circle := visit(other, [*path, file]):
                return circle
        done.add(file)
        return []

    for file in graph:
        if circle := visit(file, []):
            return circle
    return []


def shared_names(files: list[Path]) -> Iterator[str]:
    """A line for each name that several files give to a type of the same namespace. Nested types do not count."""
    places: dict[tuple[str, str], set[str]] = {}
    for file in files:
        text = file.read_text()
        namespace = NAMESPACE.search(text)
        for name in TYPE.findall(text) if namespace else []:
            place = str(file.relative_to(CSRC))
            places.setdefault((namespace[1], name), set()).add(place)
    for (namespace, name), found in sorted(places.items()):
        if len(found) > 1:
            yield f"{namespace}::{name} names several types: csrc/" + ", csrc/".join(sorted(found))


def main() -> int:
    files = [
        file
        for pattern in ("*.h", "*.cc", "*.cu", "*.def")
        for file in CSRC.rglob(pattern)
        if not file.is_relative_to(CSRC / "tests")
    ]
    graph = {str(file.relative_to(CSRC)): list(included(file)) for file in sorted(files)}
    problems = []
    for file, headers in graph.items():
        layer = layer_of(file)
        for header in headers:
            if not any(f"{header}/".startswith(f"{each}/") for each in {layer, *ALLOWED[layer]}):
                problems.append(f"csrc/{file} includes {header}: {layer} is not above that layer")
    problems += shared_names(files)
    if circle := find_circle(graph):
        problems.append("headers include each other in a circle: " + " -> ".join(circle))
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
