"""reduce, gather, scatter, send and recv over MPI, between two simulated hosts."""

import re

import pytest

from tests.harness import ROOT
from tests.harness.mpi_jobs import find, finish, mpirun, on_hosts
from tests.harness.support import seed

pytest.importorskip("mpi4py")

PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import horoplug as hvd
from horoplug.common.context import context
from tests.harness.checks.rooted import check_pairs, check_rooted
hvd.init()
assert context.connections().mpi is not None
key = int(sys.argv[1])
check_rooted(key)
check_pairs(key)
some = hvd.add_process_set([0, 1, 3])
check_rooted(key, some, [0, 1, 3])
check_pairs(key, some, [0, 1, 3])
hvd.barrier()
hvd.shutdown()
sys.stdout.write(f"rank {{MPI.COMM_WORLD.rank}} is done\\n")
"""


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_rooted_and_point_to_point_operations_over_mpi(name):
    place = find(name)
    job = mpirun(place, on_hosts(PROGRAM), str(seed()), np=4, HOROVOD_CPU_OPERATIONS="mpi")
    status, output = finish(job, timeout=100)
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) is done", output)) == ["0", "1", "2", "3"], output
