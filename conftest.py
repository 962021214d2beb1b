"""Marks everything a test session starts, so that its last test can tell what was left behind."""

import os
import signal
import uuid
from pathlib import Path

import pytest

# Inherited by every process that a test starts, however deep.
SESSION_VARIABLE = "PYTEST_SESSION_OF_HOROPLUG"


def leftover_files() -> set[Path]:
    """Files of the kinds that this project, or a framework it drives, could leave on the machine."""
    return {*Path("/dev/shm").glob("*"), *Path("/tmp").glob("*horoplug*")}


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background by a shell. Tests that interrupt processes would wait for them in vain.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex
    config.stash[FILES_BEFORE] = leftover_files()


# Run by tests/test_horovod_api.py, on several ranks at once.
collect_ignore = ["tests/horovod_api", "tests/horovod_tensorflow_api"]

FILES_BEFORE = pytest.StashKey[set[Path]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leftovers can only be looked for after everything else."""
    items.sort(key=lambda item: item.path.name == "test_leftovers.py")
