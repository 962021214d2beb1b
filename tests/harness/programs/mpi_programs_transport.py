import sys

import numpy as np

import horoplug as hvd
from horoplug.common.context import context

try:
    hvd.init()
except Exception as error:
    sys.stdout.write(f"refused: {type(error).__name__}: {error}\n")
    sys.exit(0)
assert hvd.allreduce(np.ones(1000), op=hvd.Sum).tolist() == [hvd.size()] * 1000
transport = "MPI" if context.connections().mpi else "TCP"
sys.stdout.write(
    f"over {transport}, {hvd.mpi_enabled()} {hvd.mpi_threads_supported()} {hvd.gloo_enabled()}\n"
)
