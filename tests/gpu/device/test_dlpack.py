"""Arrays with only DLPack's interface, made of PyTorch's CUDA tensors, work through ``import horoplug``."""

import numpy as np
import pytest

from tests.gpu.device.device_jobs import gpu_pool as gpu_pool
from tests.gpu.device.device_jobs import ranks as ranks

torch = pytest.importorskip("torch")

import horoplug as hvd  # noqa: E402

DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8", "bool"]


def need():
    """Why these tests cannot run here; None if they can."""
    return None if torch.cuda.is_available() else "PyTorch finds no CUDA device"


class Array:
    """A tensor that exposes only DLPack's methods."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **how):
        return self._tensor.__dlpack__(**how)


def check_operations(dtype):
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    made = np.random.default_rng(hvd.rank()).integers(0, 2 if dtype == "bool" else 5, (300, 7))
    host = torch.from_numpy(made).to(getattr(torch, dtype))

    def equal(array, expected):
        found = torch.from_dlpack(array)
        assert found.is_cuda
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)

    op = hvd.Max if dtype == "bool" else hvd.Sum
    every = hvd.allgather_object(host)
    expected = torch.stack(every).amax(0) if dtype == "bool" else sum(every).to(host.dtype)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        mine = host.to(device, non_blocking=True)
        array = Array(mine)
        first = hvd.allreduce(array, op=op)
        rows = hvd.allgather(array)
        assert hvd.allreduce_(array, op=op) is array
    equal(first, expected)
    equal(rows, torch.cat(every))
    torch.cuda.synchronize()
    assert torch.equal(mine.cpu(), expected)
    with pytest.raises(ValueError, match="contiguous"):
        hvd.allreduce(Array(mine.t()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_operations_match_numpy(ranks, dtype):
    ranks.run(check_operations, dtype)
