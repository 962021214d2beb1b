"""Failures with TensorFlow: a rank is killed or shuts down while operations are pending. Thread use, forks, missing
packages and memory are tested in new processes."""

import os
import random
import signal
import textwrap
import threading

import pytest

from tests.harness.checks.errors import errors_of_survivors
from tests.harness.checks.tensorflow_failures import check_shutdown_here
from tests.harness.support import NO_LIMITS, run_script, seed

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

pytest_plugins = ["tests.harness.jobs"]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def pending_eagerly(victim, _):
    if hvd.rank() == victim:
        die()
    hvd.allreduce(tf.ones(10), name="waiting")


def pending_in_a_graph(victim, _):
    @tf.function
    def step(x):
        return [hvd.allreduce(x, name=f"waiting{i}") for i in range(20)] + [hvd.allgather(x)]

    step.get_concrete_function(tf.ones(10))
    if hvd.rank() == victim:
        die()
    step(tf.ones(10))


def pending_at_any_moment(victim, key):
    """Large and small operations in repeated steps."""
    sizes = [3, 1_000_000, 50, 300_000]
    inputs = [tf.ones(n) for n in sizes]

    @tf.function
    def step(*inputs):
        return [hvd.allreduce(x, name=f"waiting{i}") for i, x in enumerate(inputs)]

    step(*inputs)
    if hvd.rank() == victim:
        threading.Timer(random.Random(key).uniform(0.0, 0.5), die).start()
    while True:
        step(*inputs)


def pending_join(victim, _):
    if hvd.rank() == victim:
        die()
    tf.function(hvd.join)()


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
@pytest.mark.parametrize(
    "phase", [pending_eagerly, pending_in_a_graph, pending_at_any_moment, pending_join]
)
@pytest.mark.short("*eager*", failure=True)
def test_killed_rank_is_reported(pool, phase, hosts):
    key = seed()
    victim = random.Random(key).randrange(len(hosts))
    with pool.ranks(len(hosts), hosts=hosts, env=NO_LIMITS) as job:
        errors_of_survivors(job.outcomes(phase, victim, key), victim, "UnknownError")
        survivors = type(job)([w for r, w in enumerate(job.workers) if r != victim])
        after = survivors.outcomes(lambda: hvd.allreduce(tf.ones(2)))
        assert all(o.kind == "UnknownError" and f"rank {victim}" in o.message for o in after)
        survivors.run(hvd.shutdown)


def check_different_operations():
    """The core knows that a thread waits in eager mode, and detects the deadlock."""
    name = f"only{hvd.rank()}"
    with pytest.raises(
        tf.errors.FailedPreconditionError, match=r"allreduce.only0.*allreduce.only1"
    ):
        hvd.allreduce(tf.ones(2), name=name)
    assert hvd.allreduce(tf.ones(2), op=hvd.Sum).numpy().tolist() == [2, 2]


def test_deadlock_in_eager_mode_is_reported(pool):
    with pool.ranks(2, env={"HOROVOD_DEADLOCK_TIME_SECONDS": "0.3"}) as job:
        job.run(check_different_operations)


def check_different_graphs():
    """A graph may be busy with something else for a long time, so that only a time limit ends the operation."""
    step = tf.function(lambda x: hvd.allreduce(x, name=f"only{hvd.rank()}"))
    with pytest.raises(tf.errors.UnknownError, match=r"allreduce.only[01].*giving up"):
        step(tf.ones(2))


def test_deadlock_of_graphs_ends_by_time_limit(pool):
    with pool.ranks(2, env={"HOROPLUG_OPERATION_TIMEOUT_SECONDS": "1"}) as job:
        job.run(check_different_graphs)


def test_shutdown_while_operations_are_pending(pool):
    with pool.ranks(2) as job:
        for _ in range(3):
            job.run(check_shutdown_here)


def run_code(tmp_path, code, size=1, **options):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    done = run_script(script, size=size, **options)
    for each in done:
        assert each.returncode == 0, each.stderr[-3000:]
    return done


def test_operations_do_not_block_tensorflow_threads(tmp_path):
    """With a single thread for operations, operations that wait for each other on the ranks complete, and computations
    continue."""
    run_code(
        tmp_path,
        """
        import tensorflow as tf
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        import horoplug.tensorflow as hvd
        hvd.init()
        rank = hvd.rank()
        names = list(range(16))

        @tf.function
        def step(x):
            # The ranks start the operations in opposite order.
            parts = {i: hvd.allreduce(x, op=hvd.Sum, name=f"n{i}") for i in names[:: 1 - 2 * rank]}
            return tf.add_n([parts[i] for i in names])

        for _ in range(5):
            assert step(tf.ones(4)).numpy().tolist() == [32.0] * 4
        """,
        size=2,
        env={"HOROPLUG_OPERATION_TIMEOUT_SECONDS": "30"},  # a failure then names the operation
    )


def test_forked_child_is_not_initialized(tmp_path):
    run_code(
        tmp_path,
        """
        import os
        import tensorflow as tf
        import horoplug.tensorflow as hvd
        from horoplug.tensorflow.library import OPS
        hvd.init()
        tf.function(lambda x: hvd.allreduce(x))(tf.ones(2))
        child = os.fork()
        if child == 0:
            try:
                hvd.shutdown()
                assert not hvd.is_initialized()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert hvd.allreduce(tf.ones(2)).numpy().tolist() == [1, 1]
        """,
    )


def test_missing_tensorflow_raises_import_error(tmp_path):
    code = """
    import sys
    sys.modules["tensorflow"] = None
    try:
        import horoplug.tensorflow
    except ImportError as error:
        assert "pip install tensorflow" in str(error), error
    else:
        raise SystemExit("imported")
    """
    run_code(tmp_path, code)


def test_operations_do_not_leak_memory(tmp_path):
    """Objects that horoplug takes over from TensorFlow for an operation are released after it."""
    pytest.importorskip("psutil")
    run_code(
        tmp_path,
        """
        import psutil
        import tensorflow as tf
        import horoplug.tensorflow as hvd
        hvd.init()

        @tf.function
        def step(x):
            for _ in tf.range(100):
                parts = [hvd.allreduce(x + i) for i in range(8)] + [hvd.allgather(x), hvd.broadcast(x, 0)]
                x = tf.add_n(parts) / 10 - 2.8
            return x

        def grown():
            before = psutil.Process().memory_info().rss
            step(tf.ones(10_000))
            return psutil.Process().memory_info().rss - before

        for _ in range(20):  # the core keeps a record of the last 16384 operations
            grown()
        # 1000 operations on 40 kB, 100 of each of ten kinds: a leak in one of them would be 4 MB.
        assert min(grown() for _ in range(5)) < 1_000_000
        """,
    )
