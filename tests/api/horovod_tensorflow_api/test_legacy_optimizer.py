"""DistributedOptimizer around optimizers of TensorFlow 1, in graphs with sessions."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.runner.common.util.env import get_env_rank_and_size

v1 = tf.compat.v1


class Adding(v1.train.Optimizer):
    """An optimizer that adds gradients to a variable. The gradient is this rank's number."""

    def __init__(self, use_resource=True, **kwargs):
        super().__init__(use_locking=False, name="adding", **kwargs)
        self.variable = v1.get_variable("x", initializer=[0.0], use_resource=use_resource)

    def compute_gradients(self, *args, **kwargs):
        return [(tf.constant([float(hvd.rank())]), self.variable)]

    def _apply_dense(self, grad, var):
        return var.assign_add(grad)

    def _resource_apply_dense(self, grad, var):
        return var.assign_add(grad)


@pytest.fixture
def session():
    with tf.Graph().as_default(), v1.Session() as session:
        yield session


def initialize(session):
    session.run(v1.global_variables_initializer())
    session.run(v1.local_variables_initializer())


@pytest.mark.parametrize("average", [True, False])
def test_backward_passes_per_step(session, average):
    passes = 4
    plain = Adding()
    optimizer = hvd.DistributedOptimizer(
        optimizer=plain, backward_passes_per_step=passes, average_aggregated_gradients=average
    )
    update = optimizer.apply_gradients(optimizer.compute_gradients())
    initialize(session)
    for step in range(10):
        session.run(update)
        mean = (hvd.size() - 1) / 2
        expected = (step + 1) // passes * mean * (1 if average else passes)
        assert np.isclose(session.run(plain.variable.read_value())[0], expected)


def test_minimize_averages_gradients(session):
    x = v1.get_variable("w", initializer=[1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.5, 0.9))
    step = optimizer.minimize(tf.reduce_sum(x) * (hvd.rank() + 1))
    initialize(session)
    session.run(step)
    mean = (hvd.size() + 1) / 2
    assert np.allclose(session.run(x), [1 - 0.5 * mean, 2 - 0.5 * mean])
    assert optimizer.get_slot_names() == ["momentum"]
    assert np.allclose(session.run(optimizer.get_slot(x, "momentum")), mean)
    assert len(optimizer.variables()) == 1


def test_local_variables_are_not_reduced(session):
    own, shared = (v1.get_variable(name, initializer=1.0) for name in ("own", "shared"))
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    optimizer.register_local_var(own)
    loss = (own + shared) * (hvd.rank() + 1)
    gradients = {v.name: g for g, v in optimizer.compute_gradients(loss, [own, shared])}
    initialize(session)
    assert np.isclose(session.run(gradients["own:0"]), (hvd.rank() + 1) / hvd.size())
    assert np.isclose(session.run(gradients["shared:0"]), (hvd.size() + 1) / 2)


@pytest.mark.no_job
@pytest.mark.parametrize("use_resource", [True, False])
def test_optimizer_in_a_process_set(use_resource):
    _, size = get_env_rank_and_size()
    even = hvd.ProcessSet(range(0, size, 2))
    hvd.init(process_sets=[even, hvd.ProcessSet(range(1, size, 2))])
    with tf.Graph().as_default(), v1.Session() as session:
        plain = Adding(use_resource)
        optimizer = hvd.DistributedOptimizer(
            optimizer=plain, average_aggregated_gradients=True, process_set=even
        )
        update = optimizer.apply_gradients(optimizer.compute_gradients())
        initialize(session)
        session.run(update)
        value = session.run(plain.variable.read_value())[0]
    expected = sum(even.ranks) / even.size() if even.included() else hvd.rank()
    assert np.isclose(value, expected)
    hvd.allgather_object(None)


def test_broadcast_global_variables_hook():
    with tf.Graph().as_default():
        x = v1.get_variable("x", initializer=float(hvd.rank()))
        hook = hvd.BroadcastGlobalVariablesHook(hvd.size() - 1)
        with v1.train.SingularMonitoredSession(hooks=[hook]) as session:
            assert session.run(x) == hvd.size() - 1
