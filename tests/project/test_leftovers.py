"""Runs after all other tests: no process and no file of the session is left."""

import os
import time
from pathlib import Path

import psutil
import pytest

from conftest import FILES_BEFORE, SESSION_VARIABLE, leftover_files

GRACE = 10.0  # seconds for processes that are about to end


def processes() -> dict[int, str]:
    """Processes that this session started and that still run, with their command lines."""
    mark = f"{SESSION_VARIABLE}={os.environ[SESSION_VARIABLE]}".encode()
    workers = set()
    if "PYTEST_XDIST_WORKER" in os.environ:
        workers = {process.pid for process in psutil.Process(os.getppid()).children()}
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:  # ended meanwhile, or of another user
            continue
        # multiprocessing's resource tracker and the workers of pytest -n live as long as pytest.
        lasting = "multiprocessing.resource_tracker" in command or int(folder.name) in workers
        if marked and not lasting:
            found[int(folder.name)] = command
    return found


def wait_until_empty(look):
    deadline = time.monotonic() + GRACE
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@pytest.mark.every_run
def test_no_process_is_left():
    assert not wait_until_empty(processes)


@pytest.mark.skipif(
    not os.environ.get("TEST_LEFTOVER_FILES"),
    reason="only where nothing else runs: other sessions' files look the same",
)
@pytest.mark.every_run
def test_no_file_is_left(pytestconfig):
    assert not wait_until_empty(lambda: leftover_files() - pytestconfig.stash[FILES_BEFORE])
