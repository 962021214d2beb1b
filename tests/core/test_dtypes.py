"""Complex numbers and 8-bit floats in NumPy arrays, in every operation that supports them."""

import numpy as np
import pytest

import horoplug as hvd
from tests.harness.support import ranks_fixture

pytest_plugins = ["tests.harness.jobs"]

FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
COMPLEX = ["complex64", "complex128"]

ranks = ranks_fixture("a", "aa", "aab", "abcd")


def numpy_type(name):
    return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name) if name in FLOAT8 else name)


def values(rank, dtype):
    """Small numbers whose sums over four ranks are exact in all of these types."""
    small = (np.arange(1500) + rank) % 3
    made = small.astype("float64")
    return (made + 1j * ((small + rank) % 2) if dtype in COMPLEX else made).astype(
        numpy_type(dtype)
    )


def check_moves(dtype):
    rank, size = hvd.rank(), hvd.size()
    mine = values(rank, dtype)
    everyone = [values(other, dtype) for other in range(size)]
    expected = {
        "broadcast": everyone[size - 1],
        "allgather": np.concatenate([x[: other + 3] for other, x in enumerate(everyone)]),
        "alltoall": np.concatenate([x[rank * 2 : rank * 2 + 2] for x in everyone]),
    }
    actual = {
        "broadcast": hvd.broadcast(mine, root_rank=size - 1),
        "allgather": hvd.allgather(mine[: rank + 3]),
        "alltoall": hvd.alltoall(mine[: 2 * size], splits=[2] * size)[0],
    }
    for name, result in actual.items():
        assert result.dtype == mine.dtype
        assert result.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("dtype", COMPLEX + FLOAT8)
@pytest.mark.short("aa*")
def test_operations_that_move_data(ranks, dtype):
    numpy_type(dtype)
    ranks.run(check_moves, dtype)


def check_reductions(dtype):
    size = hvd.size()
    mine = values(hvd.rank(), dtype)
    wide = "complex128" if dtype in COMPLEX else "float64"
    everyone = np.array([values(other, dtype).astype(wide) for other in range(size)])
    expected = {hvd.Sum: everyone.sum(0), hvd.Average: everyone.sum(0) / size}
    if dtype in COMPLEX:
        expected[hvd.Product] = everyone.prod(0)
    else:
        expected |= {hvd.Min: everyone.min(0), hvd.Max: everyone.max(0)}
    tolerance = {"complex64": 1e-6, "complex128": 1e-14, "float8_e4m3fn": 1 / 16}.get(dtype, 1 / 8)
    for op, result in expected.items():
        for actual in (hvd.allreduce(mine, op=op), hvd.grouped_allreduce([mine, mine], op=op)[1]):
            assert actual.dtype == mine.dtype
            np.testing.assert_allclose(
                actual.astype(wide), result, tolerance if op != hvd.Sum else 0
            )
    scattered = hvd.reducescatter(mine[: 3 * size], op=hvd.Sum)
    begin = 3 * hvd.rank()
    assert (scattered.astype(wide) == expected[hvd.Sum][begin : begin + 3]).all()


@pytest.mark.parametrize("dtype", COMPLEX + FLOAT8)
@pytest.mark.short("aa*")
def test_reductions(ranks, dtype):
    numpy_type(dtype)
    ranks.run(check_reductions, dtype)


def check_float8_accumulates_in_float32():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    # 16 + 1 is not a float8, so that sums of float8 would stay 16; 16 + 1 + 1 is one.
    mine = np.full(9, 16 if hvd.rank() == 0 else 1, ml_dtypes.float8_e4m3fn)
    total = hvd.allreduce(mine, op=hvd.Sum)
    assert (total.astype("f4") == 18).all()
    # 448 is the largest number of float8_e4m3fn; larger values become NaN, since the type has no infinities.
    beyond = hvd.allreduce(np.full(3, 300, ml_dtypes.float8_e4m3fn), op=hvd.Sum)
    assert np.isnan(beyond.astype("f4")).all()


on_one_host = ranks_fixture("aaa")


def test_float8_accumulates_in_float32_on_a_host(on_one_host):
    pytest.importorskip("ml_dtypes")
    on_one_host.run(check_float8_accumulates_in_float32)


def check_complex_has_no_order():
    for op in (hvd.Min, hvd.Max):
        with pytest.raises(ValueError, match="complex64"):
            hvd.allreduce(np.ones(3, "complex64"), op=op)
    if hvd.size() != 3:  # Adasum needs 2^n ranks
        with pytest.raises(ValueError, match="Adasum"):
            hvd.allreduce(np.ones(3, "complex64"), op=hvd.Adasum)
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == hvd.size()


def test_complex_numbers_have_no_minimum_and_no_adasum(ranks):
    ranks.run(check_complex_has_no_order)
