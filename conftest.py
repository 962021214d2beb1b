"""Marks all processes and files of a test session, so that its last test can find leftovers."""

import gc
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.harness.scheduling"]
# Helpers whose assertions are rewritten like those of tests.
pytest.register_assert_rewrite("tests.harness")

# Importing PyTorch or TensorFlow spends a tenth of its time in collections of garbage that find none. At the end of
# such a process, another third of that time goes into a collection that visits all objects of the framework, to free
# memory that the kernel frees anyway. The variable has the same effect on imports in all Python processes that tests
# start, and leaves out the collection at the end of those with a framework: see tests/harness/test_garbage.pth.
GC_THRESHOLD = 100_000  # objects; Python's default is 700
os.environ["TEST_GC_THRESHOLD"] = str(GC_THRESHOLD)
# NumPy's BLAS starts a thread for each core, which spins for a while. No test multiplies large matrices in NumPy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
gc.set_threshold(GC_THRESHOLD)

# Inherited by every descendant of a test.
SESSION_VARIABLE = "PYTEST_SESSION_OF_HOROPLUG"


def leftover_files() -> set[Path]:
    """Files of the kinds that this project, or a framework that it uses, could leave on the machine."""
    temporary = {"/tmp", os.environ["TMPDIR"]}
    files = {file for folder in temporary for file in Path(folder).glob("*horoplug*")}
    return {*files, *Path("/dev/shm").glob("*")}


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of the processes that ``pytest -n`` starts."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    # These signals are ignored if a shell in the background or nohup started the session. Processes that tests end by
    # such a signal would not end.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if is_worker(config):  # a worker inherits the variables
        config.stash[FILES_BEFORE] = {Path(file) for file in config.workerinput["files_before"]}
        return
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex
    # The folder is removed with all files that killed frameworks and pip leave in it. (This process itself uses the
    # previous TMPDIR.)
    folder = tempfile.mkdtemp(prefix="tests-", dir=tempfile.gettempdir())
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["TMPDIR"] = folder
    config.stash[FILES_BEFORE] = leftover_files()


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    from tests.harness import limits

    limits.extend(item)
    yield


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["files_before"] = [str(file) for file in node.config.stash[FILES_BEFORE]]


# tests/api/test_horovod_api.py runs these on several ranks.
collect_ignore = ["tests/api/horovod_api", "tests/api/horovod_tensorflow_api"]
# Tests run these as processes. Some commands collect all files of a folder.
collect_ignore_glob = ["tests/*/programs/*"]

ALL_TESTS = pytest.StashKey[list[pytest.Item]]()
FILES_BEFORE = pytest.StashKey[set[Path]]()


def pytest_collection_finish() -> None:
    # Thousands of tests and the frameworks that they import stay; collections of garbage need not visit them.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find out which tests are in the short set."""
    from tests.harness import short_set

    short_set.apply(items)
    config.stash[ALL_TESTS] = [*items]  # before -m removes some
