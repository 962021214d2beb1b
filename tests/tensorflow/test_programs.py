"""Operations where TensorFlow's users have them: saved models, datasets, threads, Keras."""

import threading

import pytest

from tests.harness.checks.tensorflow_programs import check_dataset, check_keras, check_saved_model
from tests.harness.support import ranks_fixture, seed

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "ab")


def test_saved_model(ranks, tmp_path):
    ranks.run(check_saved_model, str(tmp_path))


def test_dataset(ranks):
    ranks.run(check_dataset)


def check_threads():
    """Each with a graph of its own, and all at once."""
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
        thread.join(50)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_threads(ranks):
    ranks.run(check_threads)


def check_map():
    """Elements that TensorFlow may work on side by side."""
    size = hvd.size()
    mapped = tf.function(lambda: tf.map_fn(lambda n: hvd.allreduce(n, op=hvd.Sum), tf.range(20.0)))
    assert mapped().numpy().tolist() == [n * size for n in range(20)]


def test_map(ranks):
    ranks.run(check_map)


def test_keras(ranks):
    ranks.run(check_keras, seed())
