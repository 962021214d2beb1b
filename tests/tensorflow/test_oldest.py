"""The oldest supported TensorFlow, whose C API has no asynchronous kernels, in the environment .venv-oldest
(requirements/tensorflow-oldest.txt). HOROPLUG_TENSORFLOW_KERNELS makes the current version behave like it, like a
version whose asynchronous kernels cannot be derived either, or like one whose callbacks cannot be moved."""

import contextlib
import importlib
import sys

import pytest

from tests.harness import ROOT
from tests.harness.checks import tensorflow_elastic as of_elastic
from tests.harness.checks import tensorflow_failures as of_failures
from tests.harness.checks import tensorflow_gradients as of_gradients
from tests.harness.checks import tensorflow_ops as of_ops
from tests.harness.checks import tensorflow_optimizer as of_optimizer
from tests.harness.checks import tensorflow_programs as of_programs
from tests.harness.checks import tensorflow_sync_batch_norm as of_batch_norm
from tests.harness.support import Pool, seed

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

PYTHON = ROOT / ".venv-oldest" / "bin" / "python"
# Without that environment, the current version stands for it.
OLDEST = [pytest.mark.matrix] if PYTHON.exists() else []


@contextlib.contextmanager
def two_ranks(python=None, kernels=None):
    pool = Pool(python or sys.executable, modules=["tensorflow"])
    try:
        with pool.ranks(2, env={"HOROPLUG_TENSORFLOW_KERNELS": kernels} if kernels else {}) as job:
            yield job
    finally:
        pool.close()


@pytest.fixture(scope="module", params=[pytest.param("oldest", marks=OLDEST), "blocking"])
def ranks(request):
    """Two ranks with TensorFlow 2.12 or with kernels like those of 2.12, and with kernels that block."""
    python = PYTHON if PYTHON.exists() else None
    derived = None if python else "derived"
    with two_ranks(python, {"oldest": derived, "blocking": "synchronous"}[request.param]) as job:
        assert job.run(lambda: tf.__version__ == "2.12.1") == [PYTHON.exists()] * 2
        assert job.run(runs_concurrently) == [request.param == "oldest"] * 2
        yield job


def runs_concurrently():
    return importlib.import_module("horoplug.tensorflow.library").runs_concurrently()


def check_operations(key):
    for dtype in ("bfloat16", "float64", "int32", "bool"):
        of_ops.check_allreduce(dtype, hvd.Max if dtype == "bool" else hvd.Sum, key)
        of_ops.check_data_movement(dtype, key)
    of_ops.check_factors_names_and_queries()
    of_ops.check_shapes_in_graphs()
    of_ops.check_sparse()
    of_ops.check_names_between_frameworks()


def check_graphs():
    of_ops.check_unused_results()
    of_ops.check_control_flow()
    of_gradients.check_old_graphs()
    of_programs.check_dataset()


def check_gradients(key):
    of_gradients.check_allreduce_gradient(key)
    of_gradients.check_allgather_gradient(key)
    of_gradients.check_alltoall_gradient(key)
    of_gradients.check_reducescatter_gradient(key)


def check_training(key):
    of_gradients.check_training(key, {}, compiled=True)
    of_gradients.check_training(key, {"num_groups": 2}, compiled=True)
    of_gradients.check_training(key, {"sparse_as_dense": True}, compiled=False)
    of_gradients.check_tape()
    of_gradients.check_local_layers()
    of_gradients.check_broadcasts()
    of_programs.check_keras(key)


def check_many():
    """More operations than TensorFlow has threads, all ready at the same time."""

    @tf.function
    def step(x):
        return tf.add_n([hvd.allreduce(x + i, op=hvd.Sum) for i in range(40)])

    for _ in range(5):
        assert step(tf.ones([3])).numpy().tolist() == [40 * 41.0] * 3


def check_optimizer(key):
    of_optimizer.check_training(key, "graph")
    of_optimizer.check_several_backward_passes(key, "function")
    of_optimizer.check_adasum(key, "function")
    of_optimizer.check_sessions()
    of_optimizer.check_helpers()


def check_elastic():
    of_elastic.check_run(compiled=True)
    of_elastic.check_keras()
    of_elastic.check_old_graph()


def test_operations_match_numpy(ranks):
    ranks.run(check_operations, seed())


def test_operations_in_graphs(ranks):
    ranks.run(check_graphs)
    ranks.run(check_many)


def test_gradients_of_operations(ranks):
    ranks.run(check_gradients, seed())


def test_training_equals_training_on_one_rank(ranks):
    ranks.run(check_training, seed() % 10000)


def test_operations_in_a_saved_model(ranks, tmp_path):
    ranks.run(of_programs.check_saved_model, str(tmp_path))


def test_mismatch_is_reported_and_the_job_continues(ranks):
    ranks.run(of_ops.check_mismatches)


def test_optimizer_with_tensorflow_1_graphs(ranks):
    ranks.run(check_optimizer, seed() % 10000)


def test_sync_batch_norm_equals_batch_norm_on_one_batch(ranks):
    ranks.run(of_batch_norm.check_as_one_batch, seed() % 10000, False)


def test_elastic_run_restores_the_last_commit(ranks):
    ranks.run(check_elastic)


def test_shutdown_while_operations_are_pending(ranks):
    ranks.run(of_failures.check_shutdown_here)


def test_kernels_whose_callbacks_cannot_be_moved():
    with two_ranks(kernels="unmovable") as job:
        job.run(check_graphs)
        job.run(check_many)
        job.run(of_gradients.check_training, seed() % 10000, {}, True)
