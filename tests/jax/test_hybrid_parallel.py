"""examples/jax/hybrid_parallel.py on four ranks."""

import importlib.util

import pytest

from tests.harness.support import imported_example

pytest_plugins = ["tests.harness.jobs"]


def train():
    assert imported_example("jax/hybrid_parallel.py").difference(5) < 1e-5


def test_tensor_and_data_parallel_training_gives_the_result_of_one_process(pool):
    if importlib.util.find_spec("optax") is None:  # importing it would start JAX's threads
        pytest.skip("optax is not installed")
    with pool.ranks(4) as ranks:
        ranks.run(train)
