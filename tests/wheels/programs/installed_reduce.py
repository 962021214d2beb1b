import sys

import numpy as np

import horoplug as hvd

hvd.init()
total = hvd.allreduce(np.ones(3), op=hvd.Sum)
gathered = hvd.allgather(np.full(hvd.rank() + 1, hvd.rank()))
said = hvd.broadcast_object("from rank 0" if hvd.rank() == 0 else None)
if hasattr(sys, "_is_gil_enabled"):
    # The import has not turned on the lock of a Python that runs without.
    assert sys._is_gil_enabled() == ("t" not in sys.abiflags)
print(total.tolist(), gathered.tolist(), said)
