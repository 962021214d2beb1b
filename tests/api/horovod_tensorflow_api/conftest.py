"""What Horovod's TensorFlow users rely on, as tests that know nothing but ``import horovod.tensorflow as hvd``.

    horovodrun --compat -np 2 python -m pytest tests/api/horovod_tensorflow_api

``tests/api/test_horovod_api.py`` does this; the ordinary test run does not collect this folder. Every test is a job of
its own, and those that ask for ``evaluate`` run twice: eagerly, and in a graph of TensorFlow 1 with a session.
"""

from collections.abc import Callable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf


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
    hvd.allgather_object(None)
    hvd.shutdown()


@pytest.fixture(params=["eager", "graph"])
def evaluate(request: pytest.FixtureRequest, job: None) -> Iterator[Callable[..., Any]]:
    """Makes NumPy arrays of tensors, one or a structure of them."""
    if request.param == "eager":
        yield lambda tensors: tf.nest.map_structure(
            lambda t: t.numpy() if hasattr(t, "numpy") else t, tensors
        )
        return
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:

        def run(tensors: Any) -> Any:
            # What is there already is not made anew.
            session.run(tf.compat.v1.report_uninitialized_variables())
            return session.run(tensors)

        yield run


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "no_job: the test calls init() and shutdown() itself")
