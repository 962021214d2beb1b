"""Jobs that ``horovodrun --mpi`` starts, under each MPI that is installed in build/mpi."""

import os

import pytest

from tests.harness.mpi_jobs import KINDS, find

JOB = """
import os, sys
import numpy as np
import horoplug as hvd
hvd.init()
assert os.environ["HOROVOD_CACHE_CAPACITY"] == "77"
assert os.environ["NCCL_IB_DISABLE"] == "1"
total = hvd.allreduce(np.array([hvd.rank() + 1]), op=hvd.Sum)[0]
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: {total} {sys.argv[1:]}\\n")
"""


@pytest.fixture(params=KINDS)
def place(request):
    """Variables that select this MPI's mpirun."""
    pytest.importorskip("mpi4py")
    found = find(request.param)
    env = {"PATH": f"{found.mpirun.parent}:{os.environ['PATH']}"}
    if request.param == "impi":
        env |= {"I_MPI_ROOT": str(found.prefix), "I_MPI_FABRICS": "shm"}
    return env
