import sys

import numpy as np
from mpi4py import MPI

import horoplug as hvd
from horoplug.common.context import context

world = MPI.COMM_WORLD
hvd.init(comm=world)
assert (hvd.rank(), hvd.size()) == (world.rank, world.size) == (hvd.rank(), 2)
assert hvd.allreduce(np.ones(1000), op=hvd.Sum).tolist() == [2] * 1000
assert hvd.cross_size() == 2 and context.connections().mpi is not None
hvd.shutdown()
hvd.init(comm=world.Split(world.rank))
assert hvd.size() == 1
sys.stdout.write(f"rank {world.rank} of 2 is done\n")
