"""A transport over MPI that has nothing to do needs no processor time."""

import pytest

from tests.harness.mpi_jobs import find, finish, mpirun, no_files_of_mpi, on_hosts

pytest.importorskip("mpi4py")

__all__ = ["no_files_of_mpi"]  # a fixture


@pytest.mark.parametrize(("mpi", "level"), [("openmpi", "multiple"), ("mpich", "serialized")])
def test_idle_mpi_transport_uses_no_cpu_time(mpi, level):
    script = """
import resource
import time
import numpy as np
import horoplug as hvd

def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

hvd.init()
for _ in range(50):
    hvd.allreduce_(np.ones(100_000, np.float32), name="step")
handle = hvd.allreduce_async(np.ones(100), name="late") if hvd.rank() else None
def quiet():
    "Whether the process uses almost no processor time during one second."
    before, wakeups = used(), hvd.common.context.context.engine().stats()["wakeups"]
    time.sleep(1.0)
    more = hvd.common.context.context.engine().stats()["wakeups"] - wakeups
    took = used() - before
    return took < 0.03 and more < 20
# On a busy machine the other rank may still be executing earlier steps.
assert any(quiet() for _ in range(5))
if handle is None:
    handle = hvd.allreduce_async(np.ones(100), name="late")
hvd.synchronize(handle)
for _ in range(20):
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(np.ones(70_000), op=hvd.Sum)[-1] == 2
print("done", flush=True)
"""
    script = f"import mpi4py; mpi4py.rc.thread_level = {level!r}\n" + on_hosts(script)
    status, output = finish(mpirun(find(mpi), script, HOROVOD_CPU_OPERATIONS="mpi"))
    assert status == 0, output
    assert output.count("done") == 2, output
