"""Whether Slurm's variables in a process's environment still describe this process.

Every process that a task starts inherits the variables: also those of a shell of ``srun --pty``, from which a user
starts programs, and of a tmux server, whose shells keep them long after the job's end."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

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
    """Why ``env`` has its variables of a step from another process; empty if it describes this process.

    It is also empty if that cannot be known: Slurm does not tell the task's pid, or this process runs in a container
    that does not show it."""
    task = env.get("SLURM_TASK_PID", "").strip()
    if not task.isdecimal():
        return ""
    line = _ancestry(os.getpid())
    found = line.get(int(task))
    if found is not None:
        # Only an interactive shell puts its commands into process groups of their own, on the terminal of its step.
        if found.terminal != 0 and found.group != os.getpgrp():
            return "an interactive shell (srun --pty) has started this process"
        return ""
    if not line or min(each.parent for each in line.values()) > 1 or not _sees_all_processes():
        return ""
    return f"that task, process {task}, has not started this process"


def why_over(env: Mapping[str, str]) -> str:
    """Why the job of Slurm that ``env`` describes has no hosts any more; empty if it has, or if Slurm does not tell."""
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
    """A process and the processes above it, as far as this process sees them, without the first one."""
    found: dict[int, _Process] = {}
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The command's name, in parentheses, can contain anything.
                fields = file.read().decode("latin-1").rpartition(")")[2].split()
        except OSError:
            break
        found[pid] = _Process(*map(int, (fields[1], fields[2], fields[4])))
        pid = found[pid].parent
    return found


def _sees_all_processes() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == _INITIAL_NAMESPACE
    except OSError:
        return False
