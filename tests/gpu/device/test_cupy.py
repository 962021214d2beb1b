"""CuPy arrays give the same results as NumPy arrays through ``import horoplug``."""

import pytest

from tests.gpu.device.cupy_checks import check_operations, check_streams
from tests.gpu.device.cupy_checks import need as need
from tests.gpu.device.device_jobs import gpu_pool as gpu_pool
from tests.gpu.device.device_jobs import ranks as ranks


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "uint8"])
def test_cupy_operations_match_numpy(ranks, dtype):
    ranks.run(check_operations, dtype)


def test_cupy_operations_follow_streams(ranks):
    ranks.run(check_streams)
