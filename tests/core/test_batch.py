"""Batches of operations: one call submits a batch, and one call waits for it."""

import signal

import numpy as np
import pytest

import horoplug as hvd
from horoplug.common.batch import Batch, prepare
from horoplug.common.context import context
from horoplug.common.opspec import BY_NAME, Call
from tests.harness.support import ranks_fixture

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aa", "aab")

FLOAT32 = 7


def batch(arrays, names, op=hvd.Sum):
    spec = BY_NAME["allreduce"]
    prepared = [
        prepare(spec, Call(name, op), FLOAT32, array.shape)
        for name, array in zip(names, arrays, strict=True)
    ]
    return Batch(prepared, [array.ctypes.data for array in arrays], arrays)


def arrays(count, shape=3):
    return [np.full(shape, hvd.rank() + n, np.float32) for n in range(count)]


def total(n):
    return sum(r + n for r in range(hvd.size()))


def check_results():
    for _ in range(3):
        mine = arrays(200)
        made = batch(mine, [f"b{n}" for n in range(200)])
        assert made.refused is None
        assert len(set(made.numbers)) == 200
        assert made.wait() is None
        assert all((x == total(n)).all() for n, x in enumerate(mine))
        assert made.wait() is None, "waited for already"
    assert not context.operations
    assert not context.blocking


def check_one_by_one():
    mine = arrays(5)
    made = batch(mine, "abcde")
    assert hvd.synchronize(made.numbers[3]) is mine[3]
    assert (mine[3] == total(3)).all()
    assert hvd.synchronize(made.numbers[3]) is None
    assert hvd.poll(made.numbers[3])
    assert made.wait() is None
    assert all((x == total(n)).all() for n, x in enumerate(mine))
    assert hvd.synchronize(made.numbers[0]) is None
    assert not context.operations
    assert not context.blocking


def check_failure():
    """Only the failed operation has an error; the others complete."""
    mine = arrays(3)
    if hvd.rank() == 0:
        mine[1] = np.ones(4, np.float32)
    made = batch(mine, ["x", "bad", "y"])
    failure = made.wait()
    assert isinstance(failure, hvd.HorovodInternalError)
    assert "allreduce.bad" in str(failure)
    assert (mine[0] == total(0)).all()
    assert (mine[2] == total(2)).all()
    made = batch(mine[:2], ["x", "bad"])
    with pytest.raises(hvd.HorovodInternalError, match=r"allreduce\.bad"):
        hvd.synchronize(made.numbers[1])
    assert made.wait() is None
    assert not context.operations
    assert not context.blocking


def check_refused():
    """A name is in flight: the operations before it are submitted, the others are not."""
    mine = arrays(4)
    names = ["p", "q", "p", "r"] if hvd.rank() == 0 else ["p", "q"]
    if hvd.rank() > 0:
        hvd.barrier()
    made = batch(mine[: len(names)], names)
    if hvd.rank() == 0:
        assert isinstance(made.refused, ValueError)
        assert "allreduce.p" in str(made.refused)
        hvd.barrier()
    assert len(made.numbers) == 2
    assert made.wait() is None
    assert (mine[1] == total(1)).all()
    assert (mine[2] == hvd.rank() + 2).all()
    assert not context.operations
    assert not context.blocking


def check_interrupt():
    """A wait can be interrupted and repeated."""

    class Interrupted(BaseException):
        pass

    def interrupt(*_):
        raise Interrupted

    mine = arrays(2)
    if hvd.rank() == 0:
        made = batch(mine, "st")
        previous = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            made.wait()
        signal.signal(signal.SIGALRM, previous)
        hvd.barrier()
    else:
        hvd.barrier()
        made = batch(mine, "st")
    assert made.wait() is None
    assert (mine[0] == total(0)).all()


def check_old_job():
    made = batch(arrays(2), "uv")
    hvd.barrier()  # otherwise the operation is refused if the other rank shuts down first
    hvd.shutdown()
    hvd.init()
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        made.wait()
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        hvd.synchronize(made.numbers[0])


@pytest.mark.parametrize(
    "check", [check_results, check_one_by_one, check_failure, check_refused, check_interrupt]
)
@pytest.mark.short("aa*")
def test_batch_operations(ranks, check):
    ranks.run(check)


def test_batch_of_an_ended_job_is_refused(pool):
    with pool.ranks(2) as ranks:
        ranks.run(check_old_job)
