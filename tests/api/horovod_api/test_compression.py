"""hvd.Compression."""

import horovod.torch as hvd
import pytest
import torch
from horovod.torch.compression import Compressor

from tests.api.horovod_api.matrix import equal

pytestmark = pytest.mark.no_job


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp16_compresses_floats(dtype):
    tensor = torch.ones(5, 5, 5, dtype=dtype)
    compressed, kept = hvd.Compression.fp16.compress(tensor)
    assert compressed.dtype == torch.float16
    equal(hvd.Compression.fp16.decompress(compressed, kept), tensor)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_fp16_leaves_integers_unchanged(dtype):
    tensor = torch.ones(5, 5, dtype=dtype)
    compressed, kept = hvd.Compression.fp16.compress(tensor)
    equal(compressed, tensor)
    equal(hvd.Compression.fp16.decompress(compressed, kept), tensor)


def test_no_compression_returns_the_tensor():
    tensor = torch.ones(3)
    compressed, kept = hvd.Compression.none.compress(tensor)
    assert compressed is tensor
    assert hvd.Compression.none.decompress(compressed, kept) is tensor


class Halving(Compressor):
    """A user-defined compressor: any class with these two static methods."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, "kept"

    @staticmethod
    def decompress(tensor, ctx):
        assert ctx == "kept"
        return tensor * 2


def test_user_defined_compressor():
    hvd.init()
    output = hvd.allreduce(torch.full((3,), 4.0), op=hvd.Sum, compression=Halving)
    equal(output, torch.full((3,), 4.0 * hvd.size()))
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compression=Halving
    )
    model(torch.full((1, 2), 1.0 + hvd.rank())).sum().backward()
    optimizer.step()
    average = sum(range(1, hvd.size() + 1)) / hvd.size()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), -average))
    hvd.barrier()
