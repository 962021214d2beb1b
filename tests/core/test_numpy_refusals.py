"""Invalid calls are refused before anything is sent: arguments, dtypes, layouts, and names in flight."""

import numpy as np
import pytest

import horoplug as hvd
from tests.harness.checks.errors import refused
from tests.harness.support import ranks_fixture

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "aab")


class OnlyConvertible:
    def __array__(self, dtype=None, copy=None):
        return np.ones(2)


def check_refusals():
    x = np.ones((4, 3), np.float32)
    durations = x.astype("m8[s]")
    refused(ValueError, "timedelta64.* is not supported.*float32", lambda: hvd.allreduce(durations))
    refused(ValueError, "is not supported", lambda: hvd.allreduce(x.astype(">f4")))
    refused(ValueError, "is not supported", lambda: hvd.allgather(np.array(["text"])))
    refused(TypeError, "expected a NumPy array, got dict", lambda: hvd.allreduce({}))
    refused(TypeError, "expected a NumPy array, got float", lambda: hvd.allreduce_(1.0))
    refused(ValueError, "contiguous.*C order", lambda: hvd.allreduce_(x.T))
    refused(ValueError, "contiguous", lambda: hvd.broadcast_(x[:, ::2], 0))
    frozen = x.copy()
    frozen.flags.writeable = False
    refused(ValueError, "read-only", lambda: hvd.allreduce_(frozen))
    refused(ValueError, "bool has no average", lambda: hvd.allreduce(x > 0))
    refused(ValueError, "bool has no average", lambda: hvd.reducescatter(x > 0))
    refused(ValueError, "only one|supersedes", lambda: hvd.allreduce(x, average=True, op=hvd.Sum))
    refused(ValueError, "op=9 is not a reduction", lambda: hvd.allreduce(x, op=9))
    refused(ValueError, "Average and op=Sum, not Max", lambda: hvd.reducescatter(x, op=hvd.Max))
    refused(RuntimeError, "not Adasum", lambda: hvd.reducescatter(x, op=hvd.Adasum))
    refused(ValueError, "scalar", lambda: hvd.reducescatter(np.float32(1)))
    refused(ValueError, "scalar", lambda: hvd.alltoall(np.float32(1)))
    refused(
        ValueError, "one integer for each rank", lambda: hvd.alltoall(x, splits=[1.5] * hvd.size())
    )
    refused(ValueError, ".", lambda: hvd.alltoall(x, splits=[1] * (hvd.size() + 1)))
    refused(ValueError, ".", lambda: hvd.alltoall(x, splits=[99] * hvd.size()))
    refused(ValueError, ".", lambda: hvd.broadcast(x, hvd.size()))
    refused(ValueError, ".", lambda: hvd.broadcast(x, -1))
    if hvd.size() == 3:
        refused(NotImplementedError, "for 3 ranks", lambda: hvd.allreduce(x, op=hvd.Adasum))
    else:
        refused(ValueError, "Adasum works on", lambda: hvd.allreduce(x.astype(int), op=hvd.Adasum))
    refused(ValueError, "at least one", lambda: hvd.grouped_allreduce([]))
    refused(TypeError, "takes a list", lambda: hvd.grouped_allreduce(x))
    refused(TypeError, "unexpected keyword", lambda: hvd.allreduce(x, colour=1))
    refused(TypeError, "root_rank", lambda: hvd.broadcast(x))
    refused(TypeError, "ProcessSet", lambda: hvd.allreduce(x, process_set=3))
    refused(ValueError, "not registered", lambda: hvd.barrier(hvd.ProcessSet([0])))
    hidden = np.ma.array(x, mask=x > 0)
    for call in (hvd.allreduce, hvd.allgather_async, hvd.allreduce_):
        refused(TypeError, r"masked array.*pass x\.filled", lambda call=call: call(hidden))
    refused(TypeError, "masked array", lambda: hvd.grouped_allreduce([x, hidden]))
    refused(ValueError, "the list cannot be made an array", lambda: hvd.allreduce([[1.0], []]))
    refused(TypeError, "str; use broadcast_object", lambda: hvd.allgather("text"))
    refused(TypeError, r"pass np\.asarray\(x\)", lambda: hvd.allgather(OnlyConvertible()))
    # Options of a wrong kind: the error names the argument.
    refused(TypeError, "root_rank= takes an integer, got 'a'", lambda: hvd.broadcast(x, "a"))
    refused(TypeError, "root_rank= takes an integer", lambda: hvd.gather_async(x, 0.5))
    refused(TypeError, "root_rank= takes an integer", lambda: hvd.broadcast_object(x, None))
    refused(ValueError, "root_rank=.* is too large", lambda: hvd.broadcast(x, 2**70))
    refused(TypeError, "send: dest= takes an integer", lambda: hvd.send(x, None))
    refused(TypeError, "recv: source= takes an integer", lambda: hvd.recv_async(x, "0"))
    refused(TypeError, "tag= takes an integer", lambda: hvd.send_async(x, 0, tag=1.5))
    refused(TypeError, "name= takes a string, got int", lambda: hvd.allreduce(x, name=0))
    for factor in ("prescale_factor", "postscale_factor"):
        for wrong in (None, "2", 1j, [2.0]):
            options = {factor: wrong}
            refused(TypeError, f"{factor}= takes a number", lambda o=options: hvd.allreduce(x, **o))
    refused(ValueError, r"op=\[0\] is not a reduction", lambda: hvd.allreduce(x, op=[0]))
    refused(TypeError, "average= takes True or False", lambda: hvd.allreduce(x, x))
    refused(ValueError, "one integer for each rank", lambda: hvd.alltoall(x, splits=[[1], []]))
    for call in (hvd.synchronize, hvd.poll):
        for wrong in ("1", x, [0]):
            refused(TypeError, "takes a handle", lambda c=call, w=wrong: c(w))
    assert hvd.synchronize(None) is None  # as in Horovod: of an operation that was not submitted
    refused(TypeError, "takes a ProcessSet", lambda: hvd.remove_process_set([0]))
    refused(ValueError, "ranks as integers", lambda: hvd.ProcessSet(hidden))
    # The job still works.
    assert hvd.allreduce(1 + 2j) == 1 + 2j
    assert (hvd.allreduce(np.matrix(x)) == 1).all()
    assert (hvd.allreduce(x) == 1).all()


@pytest.mark.short(failure=True)
def test_invalid_arguments_are_refused(ranks):
    ranks.run(check_refusals)


def check_duplicate_name():
    if hvd.size() == 1:
        return
    x = np.ones(4)
    if hvd.rank() == 0:
        first = hvd.allreduce_async(x, name="twice")
        refused(ValueError, "twice", lambda: hvd.allreduce_async(x, name="twice"))
        hvd.barrier()
        hvd.synchronize(first)
    else:
        hvd.barrier()
        hvd.allreduce(x, name="twice")
    hvd.allreduce(x, name="twice")


@pytest.mark.short(failure=True)
def test_duplicate_name_in_flight_is_refused(pool):
    with pool.ranks(2) as job:
        job.run(check_duplicate_name)


def check_average_argument():
    x = np.full(2, hvd.rank() + 1.0)
    with pytest.warns(DeprecationWarning, match="op=Average"):
        mean = hvd.allreduce(x, True)
    with pytest.warns(DeprecationWarning, match="op=Sum"):
        total = hvd.allreduce(x, average=False)
    assert (mean * hvd.size() == total).all()


def test_average_argument_is_deprecated(ranks):
    ranks.run(check_average_argument)
