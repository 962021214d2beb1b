# pyright: strict
"""``import horoplug as hvd``: job, operations, handles, process sets, objects."""

from collections.abc import Callable
from typing import Any

import numpy as np
from typing_extensions import assert_type

import horoplug as hvd


def job() -> None:
    hvd.init()
    hvd.init(process_sets=[hvd.ProcessSet([0]), [0, 1]])
    hvd.init(comm=[0, 1])
    assert_type(hvd.rank(), int)
    assert_type(hvd.size(), int)
    assert_type(hvd.local_rank(), int)
    assert_type(hvd.local_size(), int)
    assert_type(hvd.cross_rank(), int)
    assert_type(hvd.cross_size(), int)
    assert_type(hvd.is_initialized(), bool)
    assert_type(hvd.is_homogeneous(), bool)
    assert_type(hvd.mpi_built(), bool)
    assert_type(hvd.nccl_built(), int)
    print(hvd.__version__, hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
    hvd.start_timeline("timeline.json", mark_cycles=True)
    hvd.stop_timeline()
    hvd.barrier()
    assert_type(hvd.join(), int)
    hvd.shutdown()


Array = np.ndarray[Any, Any]


def operations(x: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    assert_type(hvd.allreduce(x), Array)
    hvd.allreduce(x, name="x", op=hvd.Sum, prescale_factor=0.5, postscale_factor=2)
    hvd.allreduce(x, average=False)
    hvd.allreduce_(x, op=hvd.Max)
    assert_type(hvd.grouped_allreduce([x, x], op=hvd.Sum), list[Array])
    assert_type(hvd.grouped_allreduce_((x, x)), list[Array])
    assert_type(hvd.allgather(x), Array)
    assert_type(hvd.grouped_allgather([x]), list[Array])
    assert_type(hvd.broadcast(x, 0), Array)
    hvd.broadcast_(x, root_rank=0, name="x")
    assert_type(hvd.alltoall(x), Array)
    assert_type(hvd.alltoall(x, splits=[1, 2]), tuple[Array, Array])
    assert_type(hvd.allreduce(1.5, op=hvd.Sum), Array)
    assert_type(hvd.allgather([1, 2]), Array)
    hvd.allreduce(np.float32(3))
    hvd.allreduce([[1.0, 2.0], [3.0, 4.0]])
    assert_type(hvd.reducescatter(x, op=hvd.Sum), Array)
    assert_type(hvd.grouped_reducescatter([x]), list[Array])
    assert_type(hvd.reduce(x, 0), Array)
    hvd.reduce_(x, root_rank=0)
    assert_type(hvd.gather(x, 0), Array)
    assert_type(hvd.scatter(x, 0, splits=[1, 2]), Array)
    hvd.send(x, dest=1, tag=3)
    assert_type(hvd.recv(x, source=0, tag=3), Array)


def handles(x: np.ndarray[Any, np.dtype[np.float32]]) -> Array:
    handle = hvd.allreduce_async(x, name="x")
    assert_type(handle, int)
    assert_type(hvd.poll(handle), bool)
    started = [
        hvd.allreduce_async_(x),
        hvd.grouped_allreduce_async([x]),
        hvd.grouped_allreduce_async_([x]),
        hvd.allgather_async(x),
        hvd.grouped_allgather_async([x]),
        hvd.broadcast_async(x, 0),
        hvd.broadcast_async_(x, 0),
        hvd.alltoall_async(x),
        hvd.reducescatter_async(x),
        hvd.grouped_reducescatter_async([x]),
        hvd.send_async(x, 1),
        hvd.recv_async(x, 1),
    ]
    assert_type(started, list[int])
    result: Array = hvd.synchronize(handle)
    return result


def process_sets(x: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    even = hvd.add_process_set([0, 2])
    assert_type(even, hvd.ProcessSet)
    odd = hvd.add_process_set(hvd.ProcessSet(range(1, 4, 2)))
    assert_type(odd.process_set_id, int | None)
    assert_type(odd.ranks, list[int] | None)
    assert_type(odd.size(), int | None)
    assert_type(odd.rank(), int | None)
    assert_type(odd.included(), bool | None)
    if even.included():
        hvd.allreduce(x, process_set=even)
        hvd.barrier(even)
    assert_type(hvd.remove_process_set(even), bool)
    hvd.allreduce(x, process_set=hvd.global_process_set)


def objects() -> None:
    assert_type(hvd.broadcast_object({"epoch": 1}, root_rank=0, name="state"), Any)
    assert_type(hvd.allgather_object("a"), list[Any])
    hvd.send_object({"a": 1}, dest=1, tag=2)
    assert_type(hvd.recv_object(source=0, tag=2), Any)


def errors(step: Callable[[], None]) -> None:
    try:
        step()
    except hvd.HostsUpdatedInterrupt as interrupt:
        assert_type(interrupt.skip_sync, bool)
    except hvd.NotInitializedError:
        hvd.init()
    except hvd.HorovodInternalError as error:
        print(error)
