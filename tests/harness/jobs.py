"""The fixture ``pool``, which runs tests on real ranks. A test module requests it with
``pytest_plugins = ["tests.harness.jobs"]``."""

import pytest

from tests.harness.support import Pool

_POOL = Pool()


@pytest.fixture(scope="session")
def pool() -> Pool:
    """A pool of processes for jobs; see support.py."""
    return _POOL


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the processes after the last module that uses them, since later tests may look for leftover processes."""
    following = getattr(nextitem, "module", None)
    if __name__ not in getattr(following, "pytest_plugins", []):
        _POOL.close()
