"""Fixtures that run a test on two ranks with each Keras backend, which a process selects when it imports Keras. A test
module requests them with ``pytest_plugins = ["tests.harness.keras_jobs"]``."""

from collections.abc import Iterator

import pytest

from tests.harness.support import QUICK_XLA, Pool, Ranks

# Keras imports TensorFlow with every backend, and TensorFlow logs a lot.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
_FRAMEWORKS = {"tensorflow": "tensorflow", "torch": "torch", "jax": "horoplug.jax"}


@pytest.fixture(scope="module", params=list(_FRAMEWORKS))
def keras_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Processes that use one backend."""
    pytest.importorskip(_FRAMEWORKS[request.param])
    variables = {**QUIET, "KERAS_BACKEND": request.param}
    variables |= QUICK_XLA if request.param == "jax" else {}
    pool = Pool(variables=variables, modules=["keras", "horoplug.keras"])
    yield pool
    pool.close()


@pytest.fixture
def keras_ranks(keras_pool: Pool) -> Iterator[Ranks]:
    """A job of two ranks."""
    with keras_pool.ranks(2) as job:
        yield job
