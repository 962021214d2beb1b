"""Horovod's TensorFlow API: tests that use nothing but ``import horovod.tensorflow as hvd``.

    horovodrun --compat -np 2 python -m pytest tests/api/horovod_tensorflow_api

``tests/api/test_horovod_api.py`` does this; the ordinary test run does not collect this folder. Every test is a
separate job, and tests with the fixture ``evaluate`` run twice: eagerly, and in a graph of TensorFlow 1 with a session.
"""

from collections.abc import Callable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf


@pytest.fixture(autouse=True)
def job(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test in its own job, except tests marked ``no_job``. Operations that a test leaves in flight do not fail
    the next test."""
    if request.node.get_closest_marker("no_job"):
        yield
        hvd.shutdown()
        return
    hvd.init()
    yield
    hvd.allgather_object(None)
    hvd.shutdown()


@pytest.fixture(params=["eager", "graph"])
def evaluate(request: pytest.FixtureRequest, job: None) -> Iterator[Callable[..., Any]]:
    """A function that converts a tensor or a structure of tensors to NumPy arrays."""
    if request.param == "eager":
        yield lambda tensors: tf.nest.map_structure(
            lambda t: t.numpy() if hasattr(t, "numpy") else t, tensors
        )
        return
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:

        def run(tensors: Any) -> Any:
            session.run(tf.compat.v1.report_uninitialized_variables())
            return session.run(tensors)

        yield run


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "no_job: the test calls init() and shutdown() itself")
