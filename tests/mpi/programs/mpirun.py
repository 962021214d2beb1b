import sys

import numpy as np
from mpi4py import MPI

import horoplug as hvd

hvd.init()
rank, size, world = hvd.rank(), hvd.size(), MPI.COMM_WORLD
assert (rank, size) == (world.rank, world.size)
assert (hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (rank, size, 1)
assert hvd.allreduce(np.array([rank]), op=hvd.Sum) == size * (size - 1) // 2

# init after shutdown.
hvd.shutdown()
hvd.init()
assert hvd.allgather(np.array([rank])).tolist() == [*range(size)]
hvd.shutdown()

# Communicators of all ranks, and of half of the ranks each, in reverse order.
hvd.init(comm=world.Dup())
assert (hvd.rank(), hvd.size()) == (rank, size)
hvd.shutdown()
halves = world.Split(rank % 2, -rank)
hvd.init(comm=halves)
assert (hvd.rank(), hvd.size()) == (halves.rank, halves.size)
assert hvd.allgather_object(rank) == halves.allgather(rank)
hvd.shutdown()
sys.stdout.write(f"rank {rank} of {size} is done\n")
