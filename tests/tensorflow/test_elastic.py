"""Elastic training with TensorFlow: the state of a run, and its recovery after a failed operation."""

import numpy as np
import pytest

from tests.harness.checks.tensorflow_elastic import check_keras, check_old_graph, check_run
from tests.harness.support import ranks_fixture

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aa")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.short(failure=True)
def test_run_restores_the_last_commit(ranks, compiled):
    ranks.run(check_run, compiled)


def check_errors_of_others():
    """Other errors are raised unchanged, also errors of the classes that horoplug's operations raise."""
    for error in (
        tf.errors.UnknownError(None, None, "mine"),
        tf.errors.FailedPreconditionError(None, None, "mine"),
        KeyError("mine"),
    ):

        @hvd.elastic.run
        def train(state, error=error):
            raise error

        with pytest.raises(type(error), match="mine"):
            train(hvd.elastic.TensorFlowState([tf.Variable(1.0)]))

    @hvd.elastic.run
    def compute(state):
        return tf.function(lambda x: tf.debugging.check_numerics(x, "mine"))(np.nan)

    with pytest.raises(tf.errors.InvalidArgumentError):
        compute(hvd.elastic.TensorFlowState([tf.Variable(1.0)]))

    @hvd.elastic.run
    def hide(state):
        state.calls += 1
        state.commit()
        try:
            if state.calls == 1:
                hvd.allreduce(tf.ones(2 + hvd.rank()), name="mismatch")
        except tf.errors.OpError:
            raise KeyError("while cleaning up")  # noqa: B904
        return state.calls

    assert hide(hvd.elastic.TensorFlowState([tf.Variable(1.0)], calls=0)) == 2
    with pytest.raises(ValueError, match="variables="):
        hvd.elastic.TensorFlowState()


def test_other_errors_are_raised_unchanged(ranks):
    ranks.run(check_errors_of_others)


def test_state_of_a_tensorflow_1_graph(ranks):
    ranks.run(check_old_graph)


@pytest.mark.short
def test_keras_state(ranks):
    ranks.run(check_keras)
