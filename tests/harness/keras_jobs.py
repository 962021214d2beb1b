"""Fixtures that run a test on two ranks with each of Keras' backends, which a process takes up when it imports Keras. A
test module asks for them with ``pytest_plugins = ["tests.harness.keras_jobs"]``."""

from collections.abc import Iterator

import pytest

from tests.harness.support import Pool, Ranks

# Keras imports TensorFlow whatever its backend is, and that is talkative.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
_FRAMEWORKS = {"tensorflow": "tensorflow", "torch": "torch", "jax": "horoplug.jax"}


@pytest.fixture(scope="module", params=list(_FRAMEWORKS))
def keras_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Processes with one backend."""
    pytest.importorskip(_FRAMEWORKS[request.param])
    pool = Pool(variables={**QUIET, "KERAS_BACKEND": request.param})
    yield pool
    pool.close()


@pytest.fixture
def keras_ranks(keras_pool: Pool) -> Iterator[Ranks]:
    """A job of two ranks."""
    with keras_pool.ranks(2) as job:
        yield job
