import os
import sys

from mpi4py import MPI

import horoplug as hvd
from horoplug.mpi.cuda import reports_cuda_aware
from tests.gpu.device import cupy_checks

if not reports_cuda_aware(MPI):
    sys.stdout.write("not CUDA-aware\n")
    sys.exit(0)
os.environ["HOROVOD_TIMELINE"] = sys.argv[1]
hvd.init()
for dtype in "float32", "float64", "float16", "int32", "uint8":
    cupy_checks.check_operations(dtype)
cupy_checks.check_streams()
hvd.shutdown()
sys.stdout.write("done\n")
