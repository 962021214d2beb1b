"""The CPU quotas of control groups (cgroups), which limit a container or a job of a scheduler.

A quota is CPU time per period, usually 100 ms. Threads may still run on every processor. When a group has used its
quota, the kernel suspends all its processes until the next period, and ranks that wait for them wait as long. The limit
is in the file ``cpu.max`` of cgroup version 2, or in ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` of version 1."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

Limits = Mapping[str, float]
"""The quotas that apply to a process, by control group. A key is text that identifies the group on its host. A value is
CPU time per second: 1.5 allows the time of one and a half processors."""

PROCESS = Path("/proc/self")
_CONTROLLER = "cpu"  # the controller of cgroup version 1 that has the quota


def limits(process: Path | None = None) -> dict[str, float]:
    """The quotas of a process: that of its control group, and those of all parent groups that are visible to it.

    ``process``: the process's folder in /proc, by default :data:`PROCESS`. The result is empty if there is no quota or
    if the quotas cannot be read."""
    found: dict[str, float] = {}
    for folder in _folders(process or PROCESS):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if processors := _quota(folder):
                status = folder.stat()
                found[f"{status.st_dev}:{status.st_ino}"] = processors
    return found


def quota(ranks: Sequence[Limits]) -> float:
    """The CPU time per second that the ranks of a host may use together; 0: no limit.

    ``ranks``: the quotas of each rank. Ranks may share one group, or each may have its own. A group's quota is divided
    equally among its ranks. The result is the smallest share of any rank times the number of ranks."""
    sharing = Counter(group for each in ranks for group in each)
    shares = [share / sharing[group] for each in ranks for group, share in each.items()]
    return min(shares) * len(ranks) if shares else 0.0


def _folders(process: Path) -> Iterator[Path]:
    """The folders of the process's control groups that can have a quota, from the innermost group to the root."""
    paths = {}  # by hierarchy: "" for version 2, _CONTROLLER for the one of version 1 that has quotas
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or _CONTROLLER in controllers.split(","):
            paths[controllers and _CONTROLLER] = path
    for name, root, point in _mounts(process):
        if name in paths:
            yield from _upward(Path(point), _relative(paths[name], root))


def _mounts(process: Path) -> Iterator[tuple[str, str, str]]:
    """For each mounted hierarchy: "" (version 2) or _CONTROLLER (version 1), the mounted group, and the mount point."""
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
    """The path of a group relative to the mounted group ``root``; empty if the group is not below ``root``, as in some
    containers."""
    prefix = root.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) and ".." not in path.split("/") else ""


def _upward(point: Path, inside: str) -> Iterable[Path]:
    parts = [part for part in inside.split("/") if part]
    return [point.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _quota(folder: Path) -> float:
    """The quota of one group in CPU time per second; 0: none. Errors: OSError, ValueError, ZeroDivisionError."""
    if (file := folder / "cpu.max").exists():
        share, period = file.read_text(encoding="ascii").split()
        return 0.0 if share == "max" else int(share) / int(period)
    share = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
    period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
    return max(int(share) / int(period), 0.0)


def _plain(text: str) -> str:
    """Decode a path of mountinfo, which contains octal escapes such as \\040 for a blank."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
