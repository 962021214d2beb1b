"""Horovod's PyTorch API: tests that use nothing but ``import horovod.torch as hvd``.

Every rank runs the same tests in the same order, as in a user's own test suite:

    horovodrun --compat -np 3 python -m pytest tests/api/horovod_api/test_allreduce.py

``tests/api/test_horovod_api.py`` does this; the ordinary test run does not collect this folder. Every test is a job of
its own: ``hvd.init()`` precedes it and ``hvd.shutdown()`` follows it. Tests marked ``shared_job`` share one.
"""

from collections.abc import Iterator

import horovod.torch as hvd
import pytest


@pytest.fixture(autouse=True)
def job(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test in its own job, except tests marked ``no_job`` and ``shared_job``. Operations that a test leaves in
    flight do not fail the next test."""
    shares = request.node.get_closest_marker("shared_job")
    if not shares:
        hvd.shutdown()
    if request.node.get_closest_marker("no_job"):
        yield
        hvd.shutdown()
        return
    if not hvd.is_initialized():
        hvd.init()
    yield
    if hvd.is_initialized():
        hvd.barrier()
        if not shares:
            hvd.shutdown()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "no_job: the test calls init() and shutdown() itself")
    config.addinivalue_line("markers", "shared_job: successive tests with this mark run in one job")
