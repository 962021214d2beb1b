"""What Horovod's users rely on, as tests that know nothing but ``import horovod.torch as hvd``.

They run as a user of Horovod runs a test suite, every rank the same tests in the same order:

    horovodrun --compat -np 3 python -m pytest tests/api/horovod_api/test_allreduce.py

``tests/api/test_horovod_api.py`` does this; the ordinary test run does not collect this folder. Every test is a job of
its own: ``hvd.init()`` before it, ``hvd.shutdown()`` after it.
"""

from collections.abc import Iterator

import horovod.torch as hvd
import pytest


@pytest.fixture(autouse=True)
def job(request: pytest.FixtureRequest) -> Iterator[None]:
    """A job around every test but those that are marked ``no_job``. What a test leaves in flight is no reason for the
    next one to fail."""
    if request.node.get_closest_marker("no_job"):
        yield
        hvd.shutdown()
        return
    hvd.init()
    yield
    if hvd.is_initialized():
        hvd.barrier()
        hvd.shutdown()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "no_job: the test calls init() and shutdown() itself")
