"""Determines whether Slurm's variables in the environment of a process describe this process.

Every descendant of a task inherits the variables. Examples are programs that a user starts from a shell of
``srun --pty``, and shells of a tmux server, which keep the variables long after the job has ended."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from horoplug.base.processes import stat

_SECONDS = 5.0  # limit for Slurm's answer
_INITIAL_NAMESPACE = "pid:[4026531836]"  # fixed by Linux (PROC_PID_INIT_INO)
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PENDING", "PREEMPTED", "REVOKED", "TIMEOUT"),
}


class _Process(NamedTuple):
    parent: int
    group: int
    terminal: int


def why_inherited(env: Mapping[str, str]) -> str:
    """Why the variables of a step in ``env`` describe another process; empty if they describe this process.

    The result is also empty if that is unknown: Slurm does not give the pid of the task, or this process runs in a
    container in which that process is not visible."""
    task = env.get("SLURM_TASK_PID", "").strip()
    if not task.isdecimal():
        return ""
    line = _ancestry(os.getpid())
    found = line.get(int(task))
    if found is not None:
        # Only an interactive shell on the terminal of a step starts each command in a process group of its own.
        if found.terminal != 0 and found.group != os.getpgrp():
            return "an interactive shell (srun --pty) has started this process"
        return ""
    if not line or min(each.parent for each in line.values()) > 1 or not _sees_all_processes():
        return ""
    return f"that task, process {task}, has not started this process"


def why_over(env: Mapping[str, str]) -> str:
    """Why the Slurm job that ``env`` describes has no hosts any more; empty if it still has, or if that is unknown."""
    job, squeue = env.get("SLURM_JOB_ID", "").strip(), shutil.which("squeue", path=env.get("PATH"))
    if not job.isdecimal() or squeue is None:
        return ""
    command = [squeue, "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    states = done.stdout.split()
    if "Invalid job id" in done.stderr:
        return f"Slurm does not know job {job} any more"
    if states and _ENDED.issuperset(states):
        return f"Slurm's job {job} is over ({states[0]})"
    return ""


def _ancestry(pid: int) -> dict[int, _Process]:
    """A process and its ancestors that are visible to this process, without the topmost one, by pid."""
    found: dict[int, _Process] = {}
    while pid > 1 and (fields := stat(pid)) is not None:
        found[pid] = _Process(*map(int, (fields[1], fields[2], fields[4])))
        pid = found[pid].parent
    return found


def _sees_all_processes() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == _INITIAL_NAMESPACE
    except OSError:
        return False
