import os
import sys

from mpi4py import MPI

import horoplug as hvd
from horoplug.mpi import cuda as mpi_cuda
from tests.harness.checks import gpu as checks

folder, rank = sys.argv[1], MPI.COMM_WORLD.rank


def run(name, says_so):
    mpi_cuda.reports_cuda_aware = lambda MPI: says_so
    os.environ["HOROVOD_TIMELINE"] = f"{folder}/{name}.json"
    hvd.init()
    checks.check_operations("float32")
    hvd.shutdown()


if sys.argv[2:] == ["differ"]:
    os.environ["HOROPLUG_MPI_CUDA"] = str(rank)
    run("differ", rank == 0)
else:
    run("asked", mpi_cuda.reports_cuda_aware(MPI))
    run("some", rank == 0)
    run("yes", True)
sys.stdout.write(f"rank {rank} is done\n")
