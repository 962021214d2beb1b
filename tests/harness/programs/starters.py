import sys

import numpy as np

import horoplug as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
assert hvd.allreduce(np.array([rank]), op=hvd.Sum) == size * (size - 1) // 2
hvd.shutdown()
hvd.init()
assert hvd.allgather(np.array([rank])).tolist() == [*range(size)]
sys.stdout.write(f"rank {rank} of {size} is done\n")
