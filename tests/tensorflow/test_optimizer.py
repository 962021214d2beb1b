"""DistributedOptimizer with optimizers of TensorFlow 1, in graphs of TensorFlow 1, in eager mode and in functions,
compared with the wrapped optimizer on the data of all ranks."""

import numpy as np
import pytest

from tests.harness.checks.tensorflow_optimizer import (
    Model,
    batches,
    check_adasum,
    check_helpers,
    check_sessions,
    check_several_backward_passes,
    check_training,
    momentum,
    run,
    same_bits,
    train_v1,
)
from tests.harness.support import ranks_fixture, seed

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa")

MODES = ["graph", "eager", "function"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.short("aa*")
def test_training_equals_training_on_one_rank(ranks, mode):
    ranks.run(check_training, seed() % 10000, mode)


@pytest.mark.parametrize("mode", MODES)
def test_compressed_gradients(ranks, mode):
    ranks.run(check_compression, seed() % 10000, mode)


def check_compression(key, mode):
    """A single step, because training may amplify differences from step to step."""
    (parts,) = batches(key, 1)
    start = [v.numpy() for v in Model(key).variables]
    alone = [run("eager", lambda: Model(key), momentum, [part])[0] for part in parts]
    found, *_ = run(
        mode,
        lambda: Model(key),
        lambda: hvd.DistributedOptimizer(momentum(), compression=hvd.Compression.bf16),
        [parts[hvd.rank()]],
    )
    same_bits(found)
    errors = []
    for value, before, *after in zip(found, start, *alone, strict=True):
        steps = np.stack(after) - before
        errors.append(abs(value - before - steps.mean(0)).max())
        # Every value that is sent, and each sum, is rounded at its ninth binary digit.
        assert errors[-1] <= 2**-7 * abs(steps).max() + 1e-6
    assert max(errors) > 1e-5, "it was compressed"


@pytest.mark.parametrize("mode", MODES)
def test_backward_passes_per_step(ranks, mode):
    ranks.run(check_several_backward_passes, seed() % 10000, mode)


@pytest.mark.parametrize("mode", MODES)
def test_adasum_combines_steps(ranks, mode):
    ranks.run(check_adasum, seed() % 10000, mode)


def check_local_variables():
    """A local variable gets this rank's gradient, divided by the number of ranks or unchanged."""
    size, rank = hvd.size(), hvd.rank()
    for scale in (True, False):
        for every in (1, 2):
            own, shared = tf.Variable([1.0]), tf.Variable([1.0])
            optimizer = hvd.DistributedOptimizer(
                train_v1.GradientDescentOptimizer(1.0),
                scale_local_gradients=scale,
                backward_passes_per_step=every,
            )
            optimizer.register_local_var(own)
            for _ in range(every):
                optimizer.minimize(
                    lambda o=own, s=shared: (o + s) * (rank + 1.0), var_list=[own, shared]
                )
            share = (rank + 1) / size if scale else rank + 1
            np.testing.assert_allclose(own, [1 - every * share], 1e-6)
            np.testing.assert_allclose(shared, [1 - every * (size + 1) / 2], 1e-6)


def test_local_variables_are_not_reduced(ranks):
    ranks.run(check_local_variables)


def test_monitored_session(ranks):
    ranks.run(check_sessions)


def test_helpers_of_horovod(ranks):
    ranks.run(check_helpers)


def check_refusals():
    def make(**options):
        return hvd.DistributedOptimizer(momentum(), **options)

    for options, text in (
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average only"),
        ({"op": hvd.Adasum, "average_aggregated_gradients": True}, "cannot be used with op=Adasum"),
        ({"op": hvd.Adasum, "backward_passes_per_step": 0}, "positive"),
        ({"backward_passes_per_step": 0}, "positive"),
        ({"groups": "ab"}, "groups"),
    ):
        with pytest.raises(ValueError, match=text):
            make(**options)
    for wrong, text in (
        ({}, "dict"),
        (None, "None"),
        (tf.keras.optimizers.SGD, "the class SGD; pass"),
    ):
        with pytest.raises(ValueError, match=f"takes an optimizer of .*, got {text}") as caught:
            hvd.DistributedOptimizer(wrong)
        assert "\n" not in str(caught.value)


def test_invalid_arguments_raise(pool):
    with pool.ranks(1) as job:
        job.run(check_refusals)
