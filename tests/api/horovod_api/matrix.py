"""Dtypes and shapes that Horovod supports, and tensors with values that every dtype represents exactly."""

import itertools

import torch

REDUCED = [torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
MOVED = [torch.uint8, torch.int8, torch.int16, *REDUCED]
INTEGERS = [torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64]
NDIMS = [1, 2, 3]

REDUCED_CASES = list(itertools.product(REDUCED, NDIMS))
MOVED_CASES = list(itertools.product(MOVED, NDIMS))
FLOAT_CASES = list(itertools.product(FLOATS, NDIMS))


def whole(dtype, *shape, seed=1234):
    """Whole numbers from -100 to 99, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def cube(dtype, ndim, seed=1234):
    return whole(dtype, *[17] * ndim, seed=seed)


def scaled(tensor, factor):
    """``tensor * factor`` as Horovod computes it: integers in float64, then truncated, float16 in float32, others in
    their own dtype."""
    if tensor.dtype in INTEGERS:
        return (tensor.double() * factor).to(tensor.dtype)
    if tensor.dtype == torch.float16:
        return (tensor.float() * torch.tensor(factor, dtype=torch.float32)).half()
    return tensor * torch.tensor(factor, dtype=tensor.dtype)


def times(tensor, number):
    """The sum of ``number`` equal tensors, in the tensor's dtype."""
    if tensor.dtype == torch.float16:
        return (tensor.float() * number).half()
    return tensor * number


def equal(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected), (actual, expected)
