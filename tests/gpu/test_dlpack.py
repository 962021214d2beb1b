"""GPU arrays whose only interface is DLPack, as inputs; and results of horoplug exported by DLPack. The GPUs are
simulated (harness/simulated_gpu.py), and so are the arrays (harness/dlpack.py)."""

import ctypes
import gc
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

import horoplug as hvd
from horoplug._native import give_dlpack, take_dlpack
from horoplug.common.dtypes import NAMES
from horoplug.numpy.cuda import DeviceArray
from tests.harness import simulated_gpu
from tests.harness.dlpack import (
    COPIED,
    ON_CUDA,
    READ_ONLY,
    Producer,
    Unversioned,
    Versioned,
    consume,
)
from tests.harness.simulated_jobs import device, starter

DTYPES = [np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in NAMES]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with starter(tmp_path_factory.mktemp) as start, start("aa", 2) as made:
        yield made


def values(dtype, shape=(6, 5)):
    made = np.random.default_rng([7, hvd.rank()]).integers(0, 2 if dtype == "bool" else 5, shape)
    return made.astype(dtype)


def on_host(array):
    found = simulated_gpu.Array(device(), (0,), np.dtype(array.dtype))
    found.address, found.shape, found.stream = array.address, array.shape, array.stream
    found.nbytes = int(np.prod(array.shape)) * array.dtype.itemsize
    return found.numpy() if found.nbytes else np.empty(array.shape, array.dtype)


def equal(array, expected):
    assert isinstance(array, DeviceArray)
    found = on_host(array)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def ended(*producers):
    """Whether everything exported was released, and was exported for the default stream."""
    gc.collect()
    return all(p.all_ended() and p.streams and {*p.streams} == {1} and p.ended for p in producers)


def check_operations(versioned):
    assert "cupy" not in sys.modules
    for dtype in DTYPES:
        mine, op = values(dtype), hvd.Max if dtype == "bool" else hvd.Sum
        expected = hvd.allreduce(mine, op=op)
        # The stream is delayed: work that does not wait for it reads wrong values.
        stream = device().new_stream()
        device().delay(0.005, stream)
        array = Producer(device().array(mine, stream=stream), versioned)
        equal(hvd.allreduce(array, op=op), expected)
        equal(hvd.allgather(array), hvd.allgather(mine))
        assert hvd.allreduce_(array, op=op) is array
        equal(hvd.broadcast(array, root_rank=0), expected)
        assert len(array.streams) == 4
        assert ended(array)


@pytest.mark.parametrize("versioned", [True, False])
def test_operations_on_dlpack_arrays(ranks, versioned):
    ranks.run(check_operations, versioned)


def check_layouts():
    mine = values("float32")
    expected = hvd.allreduce(mine, op=hvd.Sum)
    for strides in (None, (5, 1)):
        array = Producer(device().array(mine))
        array.strides = strides
        equal(hvd.allreduce(array, op=hvd.Sum), expected)
        assert ended(array)
    array = Producer(device().array(mine))
    array.shape, array.offset = (4, 5), 2 * 5 * 4
    equal(hvd.allreduce(array, op=hvd.Sum), expected[2:])
    array.shape, array.strides = (
        (1, 1, 5),
        (77, 0, 1),
    )  # the strides of dimensions of size 1 are not used
    equal(hvd.allreduce(array, op=hvd.Sum), expected[None, 2:3])
    array.shape, array.strides, array.offset = (), None, 0
    equal(hvd.allreduce(array, op=hvd.Sum), expected[0, 0])
    empty = Producer(device().empty((0, 3)))
    equal(hvd.allreduce(empty, op=hvd.Sum), np.empty((0, 3), np.float32))
    kept = Producer(device().array(mine))
    kept.flags = READ_ONLY
    equal(hvd.allreduce(kept, op=hvd.Sum), expected)
    assert ended(array, empty, kept)


def test_layouts_of_dlpack_arrays(ranks):
    ranks.run(check_layouts)


def refused(message, in_place=False, error=ValueError, versioned=True, **attributes):
    array = Producer(device().array(values("float32")), versioned)
    vars(array).update(attributes)
    with pytest.raises(error, match=message) as caught:
        (hvd.allreduce_ if in_place else hvd.allreduce)(array)
    assert "\n" not in str(caught.value)
    del caught
    assert ended(array) or (error is TypeError and not array.streams)


class Refusing(Producer):
    def __dlpack__(self, *, stream, **how):
        raise BufferError("it needs a gradient")


class Repeating(Producer):
    def __dlpack__(self, *, stream, **how):
        return self.capsules[0] if self.capsules else super().__dlpack__(stream=stream, **how)


def check_refusals():
    refused("required to be contiguous", strides=(1, 6))
    refused("required to be contiguous", strides=(10, 2), shape=(3, 2))
    refused("read-only", in_place=True, flags=READ_ONLY)
    refused("read-only", in_place=True, flags=COPIED)
    refused("5:32x1 of DLPack is not supported", dtype=(5, 32, 1))
    refused("2:32x4 of DLPack is not supported", dtype=(2, 32, 4))
    refused("9:8x1 of DLPack is not supported", dtype=(9, 8, 1))
    refused("DLPack 2.0, and horoplug knows version 1", major=2)
    refused("expected a NumPy array, got Producer", error=TypeError, device_type=1)
    refused("required to be contiguous", versioned=False, strides=(1, 6))
    with pytest.raises(ValueError, match=r"of Refusing cannot be read .*: it needs a gradient"):
        hvd.allreduce(Refusing(device().empty(3)))
    twice = Repeating(device().array(np.ones(3)))
    hvd.allreduce(twice)
    with pytest.raises(ValueError, match="no capsule of DLPack, or one that is used"):
        hvd.allreduce(twice)
    assert ended(twice)
    # The last member of a group, after the others were taken.
    good, bad = (Producer(device().array(np.ones(4))) for _ in range(2))
    bad.strides = (2,)
    with pytest.raises(ValueError, match="contiguous"):
        hvd.grouped_allreduce([good, bad])
    assert ended(good, bad)


def test_unsupported_dlpack_arrays_are_refused(ranks):
    ranks.run(check_refusals)


def check_bfloat16_without_ml_dtypes():
    array = Producer(device().array(np.zeros(3, np.uint16)))
    array.dtype = (4, 16, 1)
    known, sys.modules["ml_dtypes"] = sys.modules.get("ml_dtypes"), None
    try:
        with pytest.raises(ValueError, match="ml_dtypes; install it"):
            hvd.allreduce(array)
    finally:
        sys.modules["ml_dtypes"] = known
    assert ended(array)


def test_bfloat16_without_ml_dtypes(ranks):
    ranks.run(check_bfloat16_without_ml_dtypes)


def check_lifetimes():
    """The operation keeps the memory alive until it has ended, even without another reference."""
    array = Producer(device().array(values("float32")))
    hvd.barrier()
    device().hold()
    try:
        handle = hvd.allreduce_async(array, op=hvd.Sum, name="held")
        gc.collect()
        assert not array.ended
    finally:
        device().resume()
    equal(hvd.synchronize(handle), hvd.allreduce(values("float32"), op=hvd.Sum))
    assert ended(array)


def test_dlpack_arrays_live_as_long_as_needed(ranks):
    ranks.run(check_lifetimes)


def check_given():
    """Results are exported the way other libraries import them."""
    for dtype in DTYPES:
        mine = values(dtype)
        expected = hvd.allgather(mine)
        result = hvd.allgather(Producer(device().array(mine)))
        assert result.__dlpack_device__() == (ON_CUDA, device().ordinal)
        for kind, how in ((Unversioned, {}), (Versioned, {"max_version": (1, 1)})):
            there = weakref.ref(result)
            managed = consume(result.__dlpack__(stream=1, **how), kind)
            tensor = managed.tensor
            if kind is Versioned:
                assert (managed.major, managed.minor, managed.flags) == (1, 0, 0)
            assert (tensor.data, tensor.byte_offset) == (result.address, 0)
            assert (tensor.device_type, tensor.device_id) == result.__dlpack_device__()
            given = Producer(simulated_gpu.Array(device(), (0,), dtype))
            assert (tensor.code, tensor.bits, tensor.lanes) == given.dtype
            assert tensor.shape[: tensor.ndim] == list(expected.shape)
            assert tensor.strides[: tensor.ndim] == [5, 1]
            equal(result, expected)
            del result
            gc.collect()
            assert there() is not None  # the importer keeps the memory alive
            result = there()
            managed.deleter(ctypes.addressof(managed))
        capsule = result.__dlpack__()
        del result
        gc.collect()
        assert there() is not None
        del capsule  # the capsule was not consumed
        gc.collect()
        assert there() is None


class Only:
    """A DeviceArray without ``__cuda_array_interface__``."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)


def check_given_streams():
    mine = values("float32", (5000,))
    stream = device().new_stream()
    array = device().array(mine, stream=stream)
    result = hvd.allreduce(array, op=hvd.Sum)
    assert result.stream == stream
    expected = hvd.allreduce(mine, op=hvd.Sum)
    hvd.allreduce(Only(result), op=hvd.Max)  # the first operation of a kind may wait
    device().synchronize()
    waits = device().host_waits()
    device().hold()
    try:
        again = hvd.allreduce(Only(result), op=hvd.Max)  # ordered after the default stream
        assert device().host_waits() == waits
    finally:
        device().resume()
    assert again.stream == 0
    equal(again, expected)
    other = device().new_stream()
    device().delay(0.02, stream)
    doubled = hvd.allreduce(array, op=hvd.Sum)
    for consumer in (other, None, 1, stream):
        managed = consume(doubled.__dlpack__(stream=consumer), Unversioned)
        found = simulated_gpu.Array(device(), (0,), np.dtype("float32"))
        found.address, found.shape, found.nbytes = managed.tensor.data, mine.shape, mine.nbytes
        assert found.numpy(stream=0 if consumer in (None, 1) else consumer).tobytes() == (
            expected.tobytes()
        )
        managed.deleter(ctypes.addressof(managed))
    for how in ({"copy": True}, {"dl_device": (1, 0)}, {"dl_device": (ON_CUDA, 99)}):
        with pytest.raises(BufferError, match="exported without a copy"):
            doubled.__dlpack__(**how)
    consume(doubled.__dlpack__(stream=-1, dl_device=(ON_CUDA, device().ordinal)), Unversioned)


def test_results_are_exported_by_dlpack(ranks):
    ranks.run(check_given)
    ranks.run(check_given_streams)


class OnHost:
    """An array in host memory with horoplug's DLPack export."""

    def __init__(self, values):
        self.values = values

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, *, max_version=None, **how):
        self.versioned = max_version is not None
        address, shape = self.values.ctypes.data, self.values.shape
        return give_dlpack(self, address, (1, 0), (2, 32), shape, self.versioned)


def test_numpy_imports_exported_arrays():
    """An independent library reads the exported layout."""
    values = np.array([[0, 1, 2], [3, 4, 5]], np.float32)
    for how in ({}, {"max_version": (1, 0)}):
        before = sys.getrefcount(values)
        taken = take_dlpack(values[:, 1:].__dlpack__(**how))
        assert (taken.address, taken.shape) == (values.ctypes.data + 4, (2, 2))
        assert (taken.device, taken.dtype, taken.strides) == ((1, 0), (2, 32, 1), (3, 1))
        assert not taken.read_only
        assert sys.getrefcount(values) > before
        del taken
        assert sys.getrefcount(values) == before
    owner = OnHost(values)
    there = weakref.ref(owner)
    array = np.from_dlpack(owner)
    assert owner.versioned
    del owner
    np.testing.assert_array_equal(array, values)
    assert there() is not None
    del array
    assert there() is None
