"""Whole jobs, from the start of their launcher to its end: what they cost."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple


class Cost(NamedTuple):
    seconds: float
    processor: float  # seconds, of all processes together


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit: float,
    folder: Path | None = None,
    output: IO[bytes] | None = None,
) -> Cost:
    """Run a job. ``limit``: in seconds; ``folder``: its working directory, if not this one's; ``output``: what its
    standard output and error go to. Errors: RuntimeError if the job fails or takes longer."""
    began = time.perf_counter()
    process = subprocess.Popen(
        ["timeout", str(limit), *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output and subprocess.STDOUT,
    )
    try:
        # The time is that of its descendants, too, for which it has waited.
        _, status, used = os.wait4(process.pid, 0)
    except BaseException:
        # Ctrl-C does not reach the job: timeout puts it into another process group, and passes SIGTERM on.
        process.terminate()
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} has failed with status {process.returncode}")
    return Cost(time.perf_counter() - began, used.ru_utime + used.ru_stime)


@contextlib.contextmanager
def cached_bytecode() -> Iterator[dict[str, str]]:
    """An environment in which compiled bytecode is kept from job to job, as in an installed package."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        yield environment
