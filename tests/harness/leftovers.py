"""The fixture ``nothing_is_left``: a test of ``horoplug.run`` leaves no process and no descriptor."""

import contextlib
import os
import uuid
from collections.abc import Iterator

import psutil
import pytest

from tests.harness.descriptors import open_descriptors
from tests.harness.support import until

MARK = "HOROPLUG_TEST_RUN"
"""The variable by which the processes of a test are recognised. Its value is the same in all of them."""


@pytest.fixture
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check at the end of the test that its processes have ended, and that no descriptor is open."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = open_descriptors()
    yield
    assert not processes(mark)
    # Descriptors of threads are closed soon.
    until(lambda: open_descriptors() <= before)


def processes(mark: str) -> list[psutil.Process]:
    """The processes of a test, except this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]
