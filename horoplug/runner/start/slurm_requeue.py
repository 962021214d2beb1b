"""Has Slurm run the job of which this process is a part again."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

_SECONDS = 30.0  # for slurmctld to answer


def requeue(env: Mapping[str, str]) -> str:
    """Put this process's job into Slurm's queue again, which ends it. Returns a line that tells what has happened."""
    job = env.get("SLURM_JOB_ID", "")
    if not job:
        return "the job cannot be requeued (HOROPLUG_REQUEUE): it is not in a job of Slurm"
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Slurm's job {job} was not requeued: {error}"
    if done.returncode:
        text = " ".join(done.stdout.split())
        return f"Slurm's job {job} was not requeued: scontrol requeue: {text}"
    return f"Slurm runs job {job} again"
