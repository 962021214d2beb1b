"""Wire formats on the transport over MPI."""

import random
import re
from pathlib import Path

import pytest

from tests.harness.mpi_jobs import finish, mpirun, no_files_of_mpi, place

pytest.importorskip("mpi4py")

__all__ = ["no_files_of_mpi", "place"]  # fixtures

PROGRAM = Path(__file__).parent / "programs" / "int8.py"


@pytest.mark.parametrize("algorithm", ["", "mpi"], ids=["default", "mpi"])
def test_int8_equals_its_reference_over_mpi(place, algorithm):
    seed = random.randrange(10**9)
    print("seed", seed)
    job = mpirun(
        place,
        PROGRAM.read_text(),
        str(seed),
        np=4,
        HOROVOD_CPU_OPERATIONS="mpi",
        HOROPLUG_ALGORITHM=algorithm,
    )
    status, output = finish(job, timeout=100)
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) is done", output)) == ["0", "1", "2", "3"], output
