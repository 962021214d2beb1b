"""Horoplug for NumPy arrays: ``import horoplug as hvd``.

    hvd.init()
    mean = hvd.allreduce(array)                 # every rank gets the average of all ranks' arrays
    handle = hvd.allreduce_async_(array, op=hvd.Sum)
    hvd.synchronize(handle)                     # array now holds the sum

Arrays on NVIDIA GPUs, CuPy's and others that have ``__cuda_array_interface__``, are taken, too: docs/gpu.md.

Arrays of bool, (u)int8 to (u)int64, float16, float32, float64, and bfloat16 where ml_dtypes is installed. The
operations are generated from the table in :mod:`horoplug.common.opspec`; ``help(hvd.allreduce)`` describes each.
"""

from horoplug.common.api import *  # noqa: F403
from horoplug.common.objects import allgather_object as allgather_object
from horoplug.common.objects import broadcast_object as broadcast_object
from horoplug.common.variants import barrier as barrier
from horoplug.common.variants import join as join
from horoplug.common.variants import poll as poll
from horoplug.common.variants import synchronize as synchronize
from horoplug.numpy.operations import *  # noqa: F403
