import sys

import numpy as np
from mpi4py import MPI

import horoplug as hvd
from tests.harness.checks import gpu as checks
from tests.harness.simulated_jobs import device


def check_nan_and_infinity():
    "NaN with different payloads on each rank becomes the same NaN."
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1.0, np.nan], np.float32)
    odd.view(np.uint32)[[0, 5]] = [0x7FC00001 + hvd.rank(), 0xFF812345]
    for op in hvd.Sum, hvd.Product, hvd.Max:
        expected = hvd.allreduce(odd, op=op, name="host")
        assert set(expected.view(np.uint32)[[0, 5]]) == {0x7FC00000}
        checks.equal(hvd.allreduce(device().array(odd), op=op), expected)
    expected = hvd.reducescatter(odd, op=hvd.Sum, name="host")
    checks.equal(hvd.reducescatter(device().array(odd), op=hvd.Sum), expected)


def check_factors():
    for dtype in "float32", "float64", "int32", "uint8":
        mine = checks.values(dtype, (5003,))
        factors = {"prescale_factor": 0.5, "postscale_factor": 3.0} if dtype[0] == "f" else {}
        for op in hvd.Sum, hvd.Average, hvd.Product:
            expected = hvd.allreduce(mine, op=op, name="host", **factors)
            checks.equal(hvd.allreduce(device().array(mine), op=op, **factors), expected)
    # A group of tensors of odd sizes, so that most of them are not aligned in the fusion buffer.
    mine = [checks.values("float32", (n * 7919 % 1000,), n) for n in range(9)]
    arrays = [device().array(each) for each in mine]
    expected = hvd.grouped_allreduce(mine, op=hvd.Sum, name="host")
    for found, wanted in zip(hvd.grouped_allreduce(arrays, op=hvd.Sum), expected, strict=True):
        checks.equal(found, wanted)


def check_side_by_side():
    "Operations of the host, of GPUs, and of a process set for which MPI is not used are in flight at the same time."
    other = hvd.add_process_set([0, 1])
    for turn in range(6):
        mine = checks.values("float32", (20_011,), turn)
        array = device().array(mine)
        handles = [
            hvd.allreduce_async(array, op=hvd.Sum, name="on GPU"),
            hvd.allreduce_async(mine, op=hvd.Sum, name="on host"),
            hvd.allgather_async(array, name="gathered"),
        ]
        if other.included():
            handles.append(
                hvd.allreduce_async(array, op=hvd.Max, name="of the set", process_set=other)
            )
        total, expected, gathered, *of_set = map(hvd.synchronize, handles)
        checks.equal(total, expected)
        checks.equal(gathered, hvd.allgather(mine, name="host"))
        for each in of_set:
            checks.equal(each, hvd.allreduce(mine, op=hvd.Max, name="host", process_set=other))
    hvd.remove_process_set(other)


hvd.init()
for dtype in "float32", "float16", "int64", "uint8", "bool":
    checks.check_operations(dtype)
check_nan_and_infinity()
check_factors()
checks.check_many()
checks.check_batches()
checks.check_groups()
checks.check_streams()
check_side_by_side()
checks.check_mismatch()
checks.check_join()
assert hvd.common.context.context.engine().stats()["planned_batches"] > 0
hvd.shutdown()
sys.stdout.write(f"rank {MPI.COMM_WORLD.rank} is done\n")
