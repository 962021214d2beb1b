"""Stream order of GPU tensors in Python: the calls of the core for them, and when they are released. A recorder
replaces the core, and host memory the GPU's."""

import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import horoplug as hvd
import horoplug.torch
from horoplug._native import Error
from horoplug.common.context import context
from horoplug.numpy.cuda import DeviceArray
from horoplug.torch import streams


class Recorder:
    """Replaces ``_native.Engine``: records calls as ``(what, …, stream)``; operations complete at once."""

    def __init__(self):
        self.calls = []
        self.failing = None  # the exception that waits raise
        self._handles = itertools.count(1)

    def submit(self, op, dtype, tensors, name, *options):
        device, stream = options[9:11]  # behind the nine options of an operation
        self.calls.append(("submit", name, device, stream))
        self.tensors = tensors
        return next(self._handles)

    perform = submit

    def submit_batch(self, prepared, addresses, stream=0):
        self.calls.append(("submit_batch", len(prepared), stream))
        return [next(self._handles) for _ in prepared], None

    def wait(self, handle):
        self.calls.append(("wait", handle))
        if self.failing:
            raise self.failing

    def wait_batch(self, handles):
        self.calls.append(("wait_batch", tuple(handles)))
        return [(0, self.failing)] if self.failing else []

    def stream_wait(self, handle, stream):
        self.calls.append(("stream_wait", handle, stream))

    def stream_wait_batch(self, handles, stream):
        self.calls.append(("stream_wait_batch", tuple(handles), stream))

    def device_allocate(self, device, nbytes, stream):
        self.calls.append(("allocate", device, nbytes, stream))
        return SimpleNamespace(address=4096, nbytes=nbytes)

    def result(self, handle, index=0, stream=0):
        self.calls.append(("result", handle, stream))
        memory = SimpleNamespace(address=8192, nbytes=8)
        return SimpleNamespace(rows=2, row_counts=[1, 1], memory=memory)

    def release(self, handle):
        self.calls.append(("release", handle))

    def release_batch(self, handles):
        self.calls.append(("release_batch", tuple(handles)))

    def take(self):
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def core(monkeypatch):
    recorder = Recorder()
    connections = SimpleNamespace(rank=0, size=2, local_rank=0, local_size=2)
    monkeypatch.setattr(context, "_engine", recorder)
    monkeypatch.setattr(context, "_connections", connections)
    yield recorder
    recorder.failing = None
    context._forget_stale()


class Array:
    """An array on GPU 3 that is ready in a stream."""

    def __init__(self, values, stream=None, **fields):
        self.values = np.array(values, np.float32)
        self.stream = stream
        self.fields = fields

    @property
    def __cuda_array_interface__(self):
        return {
            **self.values.__array_interface__,
            "stream": self.stream,
            "version": 3,
            **self.fields,
        }

    def __dlpack_device__(self):
        return 2, 3

    @property
    def address(self):
        return self.values.ctypes.data


def test_wait_orders_the_stream_before_the_handle_is_released(core):
    array = Array([1, 2], stream=7)
    result = hvd.allreduce(array, name="x")
    assert core.take() == [
        ("allocate", 3, 8, 7),
        ("submit", "allreduce.x", 3, 7),
        ("wait", 1),
        ("stream_wait", 1, 7),
        ("release", 1),
    ]
    assert core.tensors == [(array.address, 4096, (2,))]
    assert isinstance(result, DeviceArray)
    assert result.__cuda_array_interface__ == {
        "shape": (2,),
        "typestr": "<f4",
        "data": (4096, False),
        "strides": None,
        "stream": 7,
        "version": 3,
    }


def test_results_are_returned_in_stream_order(core):
    output, counts = hvd.alltoall(Array([1, 2], stream=7), splits=[1, 1])
    assert ("result", 1, 7) in core.calls
    assert (output.address, output.device, output.stream) == (8192, 3, 7)
    assert counts.tolist() == [1, 1]


def test_in_place_operations_return_the_same_array(core):
    array = Array([1, 2])
    assert hvd.allreduce_(array, name="x") is array
    assert core.take()[0] == ("submit", "allreduce.x", 3, 0)
    assert core.tensors == [(array.address, array.address, (2,))]


def test_streams_of_the_cuda_array_interface(core):
    for given, used in (None, 0), (1, 0), (2, 2), (99, 99):
        hvd.allreduce_(Array([1], given), name="x")
        assert core.take()[0][3] == used
    with pytest.raises(ValueError, match="different streams"):
        hvd.grouped_allreduce_([Array([1], 5), Array([2], 6)])
    assert DeviceArray(None, 1, (), np.dtype("f4"), 0, 0).__cuda_array_interface__["stream"] == 1


def test_poll_does_not_order_streams(core):
    core.poll = lambda handle: True
    handle = hvd.allreduce_async_(Array([1, 2], 7), name="x")
    assert hvd.poll(handle)
    assert core.take() == [("submit", "allreduce.x", 3, 7)]
    hvd.synchronize(handle)
    assert core.take() == [("wait", 1), ("stream_wait", 1, 7), ("release", 1)]


def test_failed_operation_is_released_in_stream_order(core):
    handle = hvd.allreduce_async_(Array([1, 2], 7), name="x")
    core.failing = Error(8, "rank 1 has died")
    with pytest.raises(hvd.HorovodInternalError, match="rank 1 has died"):
        hvd.synchronize(handle)
    assert core.take()[1:] == [("wait", 1), ("stream_wait", 1, 7), ("release", 1)]


def test_unwaited_operation_is_released_in_stream_order(core):
    array = Array([1, 2], 7)
    hvd.allreduce_async_(array, name="x")
    alive = weakref.ref(array)
    del array
    assert alive(), "the operation keeps its tensors"
    core.take()
    core.stream_wait = lambda handle, stream: core.calls.append((alive() is not None, stream))
    context._forget_stale()
    assert core.take() == [(True, 7)]
    assert not alive()


def test_group_of_host_and_gpu_arrays(core):
    mine, theirs = np.ones(2, np.float32), Array([1, 2], 7)
    assert hvd.grouped_allreduce_([mine, theirs, mine.copy()], name="g")[:2] == [mine, theirs]
    assert [call for call in core.take() if call[0] != "release"] == [
        ("submit", "allreduce.g.float32", -1, 0),
        ("submit", "allreduce.g.float32.gpu", 3, 7),
        ("wait", 1),
        ("wait", 2),
        ("stream_wait", 2, 7),
    ]


def test_unsupported_gpu_arrays_are_refused(core):
    with pytest.raises(TypeError, match="expected a NumPy array, got object"):
        hvd.allreduce(object())
    with pytest.raises(TypeError, match=r"got Tensor; import horoplug\.torch as hvd"):
        hvd.allreduce(torch.ones(2))
    with pytest.raises(ValueError, match="contiguous"):
        hvd.allreduce(Array([[1, 2], [3, 4]], strides=(4, 8)))
    with pytest.raises(ValueError, match="read-only"):
        hvd.allreduce_(Array([1], data=(1, True)))
    with pytest.raises(ValueError, match="mask"):
        hvd.allreduce(Array([1], mask=Array([0])))
    with pytest.raises(ValueError, match=r"dtype .*V4.*not supported"):
        hvd.allreduce(Array([1], typestr="|V4"))
    assert core.take() == []


def test_incomplete_dlpack_interface_is_refused(core):
    class OnDevice:
        def __dlpack_device__(self):
            return 2, 0

    with pytest.raises(TypeError, match="expected a NumPy array, got OnDevice"):
        hvd.allreduce(OnDevice())
    assert core.take() == []


class OnDevice(torch.Tensor):
    """A tensor in host memory that reports GPU 1 as its device."""

    is_cpu = False
    is_cuda = True

    def get_device(self):
        return 1


@pytest.fixture
def current(monkeypatch):
    """The current stream, in a list with one element."""
    now = [5]
    monkeypatch.setattr(streams, "current", lambda device: now[0])
    return now


def on_device(*shape):
    return torch.ones(*shape).as_subclass(OnDevice)


def test_torch_tensor_is_ordered_by_its_stream(core, current):
    """An operation that was submitted in one stream and waited for in another is ordered before later work in both."""
    handle = horoplug.torch.allreduce_async_(on_device(2), name="x")
    current[0] = 6
    horoplug.torch.synchronize(handle)
    calls = core.take()
    assert calls[:2] == [("submit", "allreduce.x", 1, 5), ("wait", 1)]
    assert set(calls[2:4]) == {("stream_wait", 1, 5), ("stream_wait", 1, 6)}
    assert calls[4:] == [("release", 1)]


def optimizer(model, **options):
    names = model.named_parameters()
    return horoplug.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), names, **options
    )


def linear():
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(on_device(2, 2))
    model.bias = torch.nn.Parameter(on_device(2))
    for parameter in model.parameters():
        parameter.grad = on_device(*parameter.shape)
    return model


@pytest.mark.short
def test_optimizer_orders_gradients_by_stream(core, current):
    """Gradients are submitted in the stream of backward, and ``step`` comes after them."""
    model = linear()
    wrapped = optimizer(model)
    (model.weight.sum() + model.bias.sum()).backward()
    assert core.take() == [("submit_batch", 2, 5)]
    current[0] = 6
    wrapped.step()
    calls = core.take()
    assert calls[0] == ("wait_batch", (1, 2))
    assert set(calls[1:3]) == {
        ("stream_wait_batch", (1, 2), 5),
        ("stream_wait_batch", (1, 2), 6),
    }
    assert calls[3:] == [("release_batch", (1, 2))]


def test_optimizer_with_parameters_on_host_and_gpu(core, current):
    model = linear()
    model.other = torch.nn.Parameter(torch.ones(3))
    wrapped = optimizer(model)
    (model.weight.sum() + model.bias.sum() + model.other.sum()).backward()
    assert sorted(core.take()) == [("submit_batch", 1, 0), ("submit_batch", 2, 5)]
    wrapped.step()
    waits = [call for call in core.take() if call[0] == "stream_wait_batch"]
    assert [len(call[1]) for call in waits] == [2]


def test_optimizer_without_synchronize_releases_in_order(core, current):
    """Submitted gradients that are abandoned are released in stream order, at the latest by the next ``init``."""
    model = linear()
    wrapped = optimizer(model)
    (model.weight.sum() + model.bias.sum()).backward()
    wrapped.load_state_dict(wrapped.state_dict())
    core.take()
    context._forget_stale()
    assert core.take() == [("stream_wait", 1, 5), ("stream_wait", 2, 5)]


def test_failed_gradients_are_released_in_stream_order(core, current):
    model = linear()
    wrapped = optimizer(model)
    (model.weight.sum() + model.bias.sum()).backward()
    core.failing = Error(5, "ranks disagree")
    core.take()
    with pytest.raises(hvd.HorovodInternalError):
        wrapped.step()
    assert core.take()[1:] == [
        ("stream_wait_batch", (2,), 5),
        ("stream_wait", 1, 5),
        ("release_batch", (1, 2)),
    ]


@pytest.mark.parametrize("where", ["one stream", "two streams"])
def test_groups_across_streams(core, monkeypatch, where):
    """A group is submitted by the last of its hooks if all ran in one stream, and else at the end of backward."""
    model = linear()
    stream = itertools.count(5) if where == "two streams" else itertools.repeat(5)
    now = [0]

    def of(tensor):
        now[0] = next(stream)
        return 1, now[0]

    monkeypatch.setattr(streams, "of", of)
    monkeypatch.setattr(streams, "current", lambda device: now[0])
    monkeypatch.setattr("horoplug.torch.gradient_reduction._SUBMIT_BYTES", 1)
    monkeypatch.setattr(
        "horoplug.torch.grouping.broadcast_object", lambda value, *args, **kwargs: value
    )
    wrapped = optimizer(model, groups=1)

    class Last(torch.autograd.Function):
        """Its backward runs first, so that the callback that it queues is called first at the end of backward."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            torch.autograd.Variable._execution_engine.queue_callback(at_end)
            return grad

    def at_end():
        core.calls.append("end of backward")
        now[0] = 4

    Last.apply(model.weight.sum() + model.bias.sum()).backward()
    submitted = ("submit", "allreduce.weight", 1, 5)
    if where == "one stream":
        assert core.take() == [submitted, "end of backward"]
    else:
        assert core.take() == ["end of backward", (*submitted[:3], 4)]
    wrapped.step()


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match="is on meta; horoplug supports tensors in the memory of"):
        streams.device_of(torch.ones(2, device="meta"))
