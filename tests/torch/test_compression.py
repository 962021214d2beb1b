"""Compression of float32 in the core gives the same bits as a compressor that casts with PyTorch."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

import horoplug.torch as hvd
from horoplug.torch.compression import CastCompressor
from tests.harness.support import ranks_fixture, seed
from tests.harness.training import Model, equal, train, wrapped

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "aab", "aaaa")

COMPRESSIONS = [hvd.Compression.fp16, hvd.Compression.bf16]
OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]


def by_pytorch(compression):
    """A class derived from a compressor, whose casts the core does not replace."""
    return type("Own", (compression,), {})


def on_one_host():
    return hvd.local_size() == hvd.size()


def by_the_core():
    """Make calls of a compressor fail, since the core has to cast."""
    message = "compressed by PyTorch"
    return patch.object(CastCompressor, "compress", side_effect=AssertionError(message))


def check_one(key):
    torch.manual_seed(key + hvd.rank())
    for compression in COMPRESSIONS:
        for op in OPS + [hvd.Adasum] * (hvd.size() in (1, 2, 4)):
            for shape in ((), (0,), (7,), (3, 1000), (90, 1000)):
                x = torch.randn(shape) * 3
                expected = hvd.allreduce(x, op=op, compression=by_pytorch(compression))
                with by_the_core():
                    found = hvd.allreduce(x, op=op, compression=compression)
                assert found.dtype == torch.float32
                assert torch.equal(found, expected)
    assert not torch.equal(x, x.half().float()), "there is something to round"


def check_factors(key):
    """Factors are applied before rounding and after the reduction."""
    torch.manual_seed(key + hvd.rank())
    x = torch.randn(5000)
    options = {"op": hvd.Sum, "compression": hvd.Compression.fp16}
    with by_the_core():
        found = hvd.allreduce(x, prescale_factor=0.3, postscale_factor=2.0, **options)
    scaled = torch.from_numpy(x.numpy() * np.float32(0.3)).half()
    assert torch.equal(found, hvd.allreduce(scaled, op=hvd.Sum, postscale_factor=2.0).float())


def check_group(key):
    """The core casts float32; the group may contain other dtypes."""
    torch.manual_seed(key + hvd.rank())
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32)
    group = [(torch.randn(40, 7) * 9).to(dtype) for dtype in (*dtypes, *dtypes)]
    for compression in COMPRESSIONS:
        own = by_pytorch(compression)
        found = hvd.grouped_allreduce(group, op=hvd.Sum, compression=compression)
        expected = hvd.grouped_allreduce(group, op=hvd.Sum, compression=own)
        for x, y, given in zip(found, expected, group, strict=True):
            assert x.dtype == given.dtype
            # Between hosts, the order of additions in 16 bits depends on the other tensors of the batch.
            close = {"rtol": 0, "atol": 0} if on_one_host() else {"rtol": 0.02, "atol": 0.2}
            torch.testing.assert_close(x, y, **close)
    assert hvd.grouped_allreduce([group[1]], compression=hvd.Compression.fp16)[0].dtype == (
        torch.float64
    )


def check_gradient(key):
    """The gradient is compressed like the tensor."""
    torch.manual_seed(key + hvd.rank())
    start, weight = torch.randn(300), torch.randn(300)
    gradients = []
    for compression in (hvd.Compression.bf16, by_pytorch(hvd.Compression.bf16)):
        x = start.clone().requires_grad_()
        (hvd.allreduce(x, op=hvd.Sum, compression=compression) * weight).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def check_training(key):
    options = [{}, {"groups": 2}, {"gradient_predivide_factor": 2.0}, {"op": hvd.Sum}]
    if hvd.size() in (2, 4):
        options.append({"op": hvd.Adasum})
    for compression in COMPRESSIONS:
        for some in options:
            models = []
            for each in (compression, by_pytorch(compression)):
                torch.manual_seed(key)
                models.append(Model())
                train(wrapped(models[-1], compression=each, **some), models[-1], 2)
            # The core applies the factors of predivision before it rounds; PyTorch's casts round first.
            equal(models[0], models[1], rtol=0.02, atol=0.02)
            if not some and on_one_host():
                equal(models[0], models[1], rtol=0, atol=0)
    with by_the_core():
        model = Model()
        train(wrapped(model, compression=hvd.Compression.fp16), model, 2)


def check_disagreement(key):
    if hvd.size() == 1:
        return
    compression = hvd.Compression.none if hvd.rank() else hvd.Compression.fp16
    with pytest.raises(
        hvd.HorovodInternalError, match="mismatched compression: float16 on rank 0 but none on"
    ):
        hvd.allreduce(torch.ones(3), name=f"gradient.{key}", compression=compression)


CHECKS = [
    check_one,
    check_factors,
    check_group,
    check_gradient,
    check_training,
    check_disagreement,
]


@pytest.mark.parametrize("check", CHECKS)
def test_core_casts_like_pytorch(ranks, check):
    ranks.run(check, seed())
