"""Operations in saved models, datasets, threads and Keras."""

import threading

import pytest

from tests.harness.checks.tensorflow_programs import check_dataset, check_keras, check_saved_model
from tests.harness.limits import scaled
from tests.harness.support import ranks_fixture, seed

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "ab")


def test_operations_in_a_saved_model(ranks, tmp_path):
    ranks.run(check_saved_model, str(tmp_path))


def test_operation_in_a_dataset(ranks):
    ranks.run(check_dataset)


def check_threads():
    """Concurrent threads, each with its own graph."""
    size = hvd.size()
    failures = []

    def work(number):
        try:
            total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name=f"thread{number}"))
            for turn in range(40):
                assert total(tf.fill([3], turn)).numpy().tolist() == [turn * size] * 3
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(50))
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_threads_with_own_graphs(ranks):
    ranks.run(check_threads)


def check_map():
    """A parallel map over a dataset."""
    size = hvd.size()
    mapped = tf.function(lambda: tf.map_fn(lambda n: hvd.allreduce(n, op=hvd.Sum), tf.range(20.0)))
    assert mapped().numpy().tolist() == [n * size for n in range(20)]


def test_operations_in_a_parallel_map(ranks):
    ranks.run(check_map)


def test_custom_train_step_of_keras(ranks):
    ranks.run(check_keras, seed())
