import numpy as np
from mpi4py import MPI

import horoplug as hvd

world = MPI.COMM_WORLD


def total(process_set):
    return hvd.allreduce(np.array([hvd.rank()]), op=hvd.Sum, process_set=process_set)[0]


# Each rank passes the communicator of its half.
half = hvd.ProcessSet(world.Split(world.rank % 2, world.rank))
assert half.ranks is None and half.mpi_comm is not None
hvd.init(comm=world, process_sets=[half])
assert half.ranks == [r for r in range(hvd.size()) if r % 2 == hvd.rank() % 2]
assert half.size() == 2 and half.included() and half.rank() == hvd.rank() // 2
assert total(half) == sum(half.ranks)
assert sorted(hvd.common.process_sets._get_process_set_ids_and_ranks().items()) == [
    (0, [0, 1, 2, 3]),
    (1, [0, 2]),
    (2, [1, 3]),
]
# Some ranks are in no communicator.
some = hvd.add_process_set(world.Split(0 if world.rank > 1 else MPI.UNDEFINED, 0))
assert some.ranks == ([2, 3] if hvd.rank() > 1 else [])
if some.included():
    assert total(some) == 5
hvd.barrier()  # because the first rank that shuts down ends the job for all ranks
hvd.shutdown()
# In a job of some of the processes in another order, process sets have the job's ranks.
part = world.Split(world.rank // 2, -world.rank)
hvd.init(comm=part)
alone = hvd.add_process_set(MPI.COMM_SELF)
assert alone.ranks == [hvd.rank()] and total(alone) == hvd.rank()
try:
    hvd.add_process_set(world)
except ValueError as error:
    assert "not all are in this job" in str(error), error
hvd.barrier()
hvd.shutdown()
# All processes in another order.
backwards = world.Split(0, -world.rank)
hvd.init(comm=backwards)
assert (hvd.rank(), hvd.size()) == (backwards.rank, 4) == (3 - world.rank, 4)
hvd.barrier()
hvd.shutdown()
world.Barrier()  # rank 0 serves the rendezvous of all jobs
print("done", flush=True)
