"""Horoplug for NumPy arrays: ``import horoplug as hvd``.

    hvd.init()
    mean = hvd.allreduce(array)                 # every rank gets the average of all ranks' arrays
    handle = hvd.allreduce_async_(array, op=hvd.Sum)
    hvd.synchronize(handle)                     # array now holds the sum

Arrays on NVIDIA GPUs are supported as well: those of CuPy and others with ``__cuda_array_interface__`` or
``__dlpack__`` (docs/gpu.md).

Supported dtypes: bool, (u)int8 to (u)int64, float16 to float64, complex64 and complex128; with ml_dtypes also bfloat16,
float8_e4m3fn and float8_e5m2. The operations are generated from the table in :mod:`horoplug.common.opspec`;
``help(hvd.allreduce)`` describes each.
"""

from horoplug.base.surface import declare as _declare
from horoplug.common.handle_api import *  # noqa: F403
from horoplug.numpy.operations import *  # noqa: F403

_declare(globals())
