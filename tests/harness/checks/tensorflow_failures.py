"""Operations that end because the job ends."""

import threading

import pytest

from tests.harness.limits import scaled

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")


def check_shutdown_here():
    """A thread waits for an operation that ends because another thread shuts down."""
    failures = []

    def wait(call):
        try:
            call(tf.ones(3))
        except tf.errors.OpError as error:
            failures.append(error)

    pending = tf.function(lambda x: [hvd.allreduce(x + i, name=f"p{i}") for i in range(10)])
    pending.get_concrete_function(tf.ones(3))
    if hvd.rank() == 0:
        calls = [pending, lambda x: hvd.allreduce(x, name="eager")]
        threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        hvd.allgather(tf.ones(1), name="begun")
        hvd.shutdown()
        for thread in threads:
            thread.join(scaled(30))
            assert not thread.is_alive()
        assert len(failures) == 2
        kinds = (tf.errors.UnknownError, tf.errors.FailedPreconditionError)
        assert all(isinstance(failure, kinds) for failure in failures)
    else:
        hvd.allgather(tf.ones(1), name="begun")
        with pytest.raises(tf.errors.UnknownError, match="rank 0 has shut down"):
            hvd.allreduce(tf.ones(3), name="never")
        hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(tf.ones(2), op=hvd.Sum).numpy().tolist() == [2, 2]
