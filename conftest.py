"""Marks everything a test session starts, so that its last test can tell what was left behind."""

import os
import shutil
import signal
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

# Helpers, whose assertions show values like those of tests.
pytest.register_assert_rewrite("tests.harness")

# Inherited by every process that a test starts, however deep.
SESSION_VARIABLE = "PYTEST_SESSION_OF_HOROPLUG"


def leftover_files() -> set[Path]:
    """Files of the kinds that this project, or a framework it drives, could leave on the machine."""
    temporary = {"/tmp", os.environ["TMPDIR"]}
    files = {file for folder in temporary for file in Path(folder).glob("*horoplug*")}
    return {*files, *Path("/dev/shm").glob("*")}


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of the processes that ``pytest -n`` starts."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    # Ignored if a shell has started the session in the background, or nohup has: tests that end processes in these
    # ways would wait for them in vain.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if is_worker(config):  # it has inherited the variables
        config.stash[FILES_BEFORE] = {Path(file) for file in config.workerinput["files_before"]}
        return
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex
    # What frameworks and pip leave in it when they are killed goes with it. (This process keeps to what there was.)
    folder = tempfile.mkdtemp(prefix="tests-", dir=tempfile.gettempdir())
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["TMPDIR"] = folder
    config.stash[FILES_BEFORE] = leftover_files()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["files_before"] = [str(file) for file in node.config.stash[FILES_BEFORE]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.harness.scheduling import Scheduling

    return Scheduling(config, log)


# Run by tests/api/test_horovod_api.py, on several ranks at once.
collect_ignore = ["tests/api/horovod_api", "tests/api/horovod_tensorflow_api"]

FILES_BEFORE = pytest.StashKey[set[Path]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leftovers can only be looked for after everything else."""
    items.sort(key=lambda item: item.path.name == "test_leftovers.py")
