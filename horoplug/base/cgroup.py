"""The processor time that control groups allow: the quota of a container or of a scheduler's job.

A quota does not take processors away. A process that has used its share of a period, 100 ms as a rule, stands still
until the next one, and so does everybody who waits for it. Version 2 of control groups has the limit in the file
``cpu.max``, version 1 in ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us``."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

Limits = Mapping[str, float]
"""The quotas that apply to a process: by control group (a text that no other group of this host has), the processors'
worth of time."""

PROCESS = Path("/proc/self")
_CONTROLLER = "cpu"  # of version 1, that limits time


def limits(process: Path | None = None) -> dict[str, float]:
    """The quotas of this process: of its control group and of all groups above that it can see.

    ``process``: the folder that describes it as /proc does, by default :data:`PROCESS`. Empty without a
    quota, or where none can be read."""
    found: dict[str, float] = {}
    for folder in _folders(process or PROCESS):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if processors := _quota(folder):
                status = folder.stat()
                found[f"{status.st_dev}:{status.st_ino}"] = processors
    return found


def quota(ranks: Sequence[Limits]) -> float:
    """The processors' worth of time that the ranks of a host may use together; 0: without a limit.

    ``ranks``: the quotas of each. Ranks may be in one group, or in groups of their own: what counts is the rank with
    the smallest share. It is multiplied by the number of ranks, so that it can be compared with that."""
    sharing = Counter(group for each in ranks for group in each)
    shares = [share / sharing[group] for each in ranks for group, share in each.items()]
    return min(shares) * len(ranks) if shares else 0.0


def _folders(process: Path) -> Iterator[Path]:
    """The folders of the process's control groups that can have a quota, from the inside out."""
    paths = {}  # by the name of a hierarchy: of version 2, or of version 1's that limits time
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or _CONTROLLER in controllers.split(","):
            paths[controllers and _CONTROLLER] = path
    for name, root, point in _mounts(process):
        if name in paths:
            yield from _upward(Path(point), _relative(paths[name], root))


def _mounts(process: Path) -> Iterator[tuple[str, str, str]]:
    """The mounted hierarchies: its name as above, the group that is mounted, and where."""
    for line in _lines(process / "mountinfo"):
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(" "), tail.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield "", _plain(fields[3]), _plain(fields[4])
        elif kind[0] == "cgroup" and _CONTROLLER in kind[2].split(","):
            yield _CONTROLLER, _plain(fields[3]), _plain(fields[4])


def _relative(path: str, root: str) -> str:
    """The path of a group below the mounted one; empty if it is not below it, as in some containers."""
    prefix = root.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) and ".." not in path.split("/") else ""


def _upward(point: Path, inside: str) -> Iterable[Path]:
    parts = [part for part in inside.split("/") if part]
    return [point.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _quota(folder: Path) -> float:
    """The quota of one group in processors; 0 without one. Errors: OSError, ValueError, ZeroDivisionError."""
    if (file := folder / "cpu.max").exists():
        share, period = file.read_text(encoding="ascii").split()
        return 0.0 if share == "max" else int(share) / int(period)
    share = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
    period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
    return max(int(share) / int(period), 0.0)


def _plain(text: str) -> str:
    """A path of mountinfo, in which a blank is written as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
