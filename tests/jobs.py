"""The fixture that runs tests on real ranks. A test module that wants it says ``pytest_plugins = ["jobs"]``."""

from collections.abc import Iterator

import pytest
from support import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Processes for the jobs of one module; see support.py."""
    made = Pool()
    yield made
    made.close()
