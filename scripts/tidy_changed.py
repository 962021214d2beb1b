"""Runs clang-tidy on the translation units that a change touches: ``make tidy-changed``, a part of CI.

    python scripts/tidy_changed.py [--seconds N] [--list] [--analyzer]

A change is what differs from a base commit, committed or not. It touches the ``.cc`` files that it edits and, for each
other file that it edits, the ``.cc`` files that include that file directly. See ``find_base`` for the base, and
``choose`` for the order. No file is begun after ``--seconds``; the number of files left out is printed.

Clang's path-sensitive analyzer takes several times as long as all other checks together, and runs on request; ``make
tidy`` always runs it.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path("build/tidy")
# Where an #include "..." is looked for, besides the folder of the file that has it.
INCLUDE_FOLDERS = ("csrc", "csrc/include", "csrc/tests")
INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
# How far back a change reaches that is on main already, if nothing names a base.
COMMITS = 20
# Seconds that the files have to end in when no further one is begun.
GRACE = 60
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def git(root: Path, *arguments: str) -> str:
    # A container may run as another user than the one who owns the checkout.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def find_base(root: Path, named: str = "") -> str:
    """The commit that a change is compared with.

    - ``named``, the value of the variable ``TIDY_BASE``, if it is not empty.
    - On a branch: its merge base with ``origin/main`` or, without a remote, with ``main``.
    - On main: the commit ``COMMITS`` commits back, or the empty tree if the history is shorter.
    """
    if named:
        return git(root, "rev-parse", "--verify", f"{named}^{{commit}}")
    head = git(root, "rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        try:
            base = git(root, "merge-base", "HEAD", main)
        except subprocess.CalledProcessError:  # no such branch, or no common history
            continue
        if base != head:
            return base
        break
    history = git(root, "rev-list", "--first-parent", f"--max-count={COMMITS + 1}", "HEAD").split()
    return history[COMMITS] if len(history) > COMMITS else EMPTY_TREE


def find_changes(root: Path, base: str) -> Counter[str]:
    """The files under csrc/ that differ from the base, with the number of lines that do."""
    changes: Counter[str] = Counter()
    # Of a renamed file: counts, an empty name, the old name, the new name.
    fields = iter(
        git(root, "diff", "--numstat", "-z", "-M", "--diff-filter=d", base, "--", "csrc").split(
            "\0"
        )
    )
    for field in fields:
        if not field:
            continue
        added, deleted, name = field.split("\t")
        if not name:
            next(fields)
            name = next(fields)
        changes[name] = sum(int(count) for count in (added, deleted) if count.isdigit())
    untracked = git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", "csrc")
    for name in filter(None, untracked.split("\0")):
        changes[name] = len((root / name).read_bytes().splitlines())
    # A pure move, or a new mode: the contents are as before.
    return +changes


def find_includers(root: Path, files: Iterable[str]) -> dict[str, set[str]]:
    """For each file that ``files`` include: those of them that include it directly."""
    includers: dict[str, set[str]] = defaultdict(set)
    for file in files:
        path = root / file
        folders = [path.parent, *(root / folder for folder in INCLUDE_FOLDERS)]
        for name in INCLUDE.findall(path.read_text()):
            found = next((folder / name for folder in folders if (folder / name).exists()), None)
            if found is not None:
                includers[os.path.relpath(found.resolve(), root.resolve())].add(file)
    return includers


def units_of(file: str, units: set[str], includers: Mapping[str, set[str]]) -> set[str]:
    """The units that include a file directly or, if there are none, by way of the fewest headers."""
    reached, seen = {file}, {file}
    while reached:
        reached = {other for one in reached for other in includers.get(one, ())} - seen
        if reached & units:
            return reached & units
        seen |= reached
    return set()


def choose(
    changes: Mapping[str, int], units: set[str], includers: Mapping[str, set[str]]
) -> list[str]:
    """The units to check, in this order.

    First those that together cover every file of the change, the most changed ones first; for a header that is one
    unit, if possible one that is edited itself or has the header's name. Then all other units that include a header of
    the change.
    """
    first = Counter({file: lines for file, lines in changes.items() if file in units})
    others: Counter[str] = Counter()
    for file in sorted(changes.keys() - units):
        covering = units_of(file, units, includers)
        others.update(dict.fromkeys(covering, changes[file]))
        if covering:
            stem = Path(file).stem
            best = min(covering, key=lambda u: (u not in first, Path(u).stem != stem, u))
            first[best] += changes[file]
    return [
        unit
        for counts in (first, Counter({u: n for u, n in others.items() if u not in first}))
        for unit in sorted(counts, key=lambda u: (-counts[u], u))
    ]


def find_units(root: Path) -> set[str]:
    """The files under csrc/ that have a compile command."""
    commands = json.loads((root / BUILD / "compile_commands.json").read_text())
    files = {os.path.relpath(command["file"], root) for command in commands}
    return {file for file in files if file.startswith("csrc/") and (root / file).exists()}


def check(root: Path, units: list[str], seconds: float, analyzer: bool = False) -> tuple[int, int]:
    """Runs clang-tidy; returns how many units have findings, and how many there was no time for."""
    end = time.monotonic() + seconds

    def run(unit: str) -> bool | None:
        if time.monotonic() >= end:
            return None
        command = [str(root / ".venv/bin/clang-tidy"), "--quiet", "-p", str(BUILD), unit]
        if not analyzer:
            command.append("--checks=-clang-analyzer-*")
        # The command is a script that runs the program: both are in the session.
        process = subprocess.Popen(
            command,
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=end + GRACE - time.monotonic())
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None
        print(f"{unit}\n{output}" if process.returncode else unit, flush=True)
        return process.returncode == 0

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(run, units))
    return results.count(False), results.count(None)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs clang-tidy on what a change touches.")
    parser.add_argument("--seconds", type=float, default=100, help="no file is begun after these")
    parser.add_argument("--list", action="store_true", help="print the files instead")
    parser.add_argument("--analyzer", action="store_true", help="run clang's analyzer as well")
    options = parser.parse_args()
    if not (ROOT / ".git").exists():
        print("clang-tidy: no git checkout, so nothing to compare with; make tidy checks all files")
        return 0
    base = find_base(ROOT, os.environ.get("TIDY_BASE", ""))
    sources = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "csrc").rglob("*"))
        if file.suffix in {".cc", ".h", ".cu", ".def"}
    ]
    units = choose(find_changes(ROOT, base), find_units(ROOT), find_includers(ROOT, sources))
    print(f"clang-tidy: the change since {base[:10]} touches {len(units)} files", flush=True)
    if options.list:
        print("\n".join(units))
        return 0
    bad, left = check(ROOT, units, options.seconds, options.analyzer)
    if left:
        print(
            f"clang-tidy: {left} of {len(units)} files were NOT checked, because the limit of"
            f" {options.seconds:g} s was reached; make tidy checks all files"
        )
    print(f"clang-tidy: {bad} of {len(units) - left} checked files have findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
