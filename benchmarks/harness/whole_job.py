"""Whole jobs, from the start of their launcher to its end: what they cost."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    seconds: float
    processor: float  # seconds, of all processes together


def run(command: Sequence[str], environment: Mapping[str, str], limit: float) -> Cost:
    """Run a job. ``limit``: in seconds. Errors: RuntimeError if the job fails or takes longer."""
    began = time.perf_counter()
    process = subprocess.Popen(
        ["timeout", str(limit), *command], env=environment, stdin=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)  # with its descendants, for which it has waited
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
