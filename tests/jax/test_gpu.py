"""horoplug.jax on simulated GPUs. The tests call the handler like XLA with streams of simulated GPUs, lower programs
for CUDA, and run eager calls with arrays on CPUs."""

import contextlib
import ctypes
import itertools
import os
import re
import signal

import numpy as np
import pytest

from tests.harness.checks import (
    jax_ops,
    jax_programs,
)
from tests.harness.simulated_jobs import device, device_ranks_fixture, job_fixture
from tests.harness.support import ranks_fixture, seed
from tests.harness.xla_calls import OPERATION, Xla

jax = pytest.importorskip("jax")
hvd = pytest.importorskip("horoplug.jax")
jnp = jax.numpy

from jax._src.lib import xla_client  # noqa: E402

import horoplug as on_host  # noqa: E402
from horoplug.common import calls  # noqa: E402
from horoplug.common.opspec import BY_NAME  # noqa: E402
from horoplug.jax import eager, gpu  # noqa: E402
from horoplug.jax.library import LIBRARY  # noqa: E402

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("ab")


# ---- the handler on simulated GPUs ---------------------------------------------------------------------------------

# Ranks by host, number of GPUs, and the transport.
JOBS = {
    "1 rank": ("a", 1, None),
    "2 ranks": ("aa", 2, None),
    "2 ranks, staged": ("aa", 2, "staged"),
}


job = job_fixture()
device_ranks = device_ranks_fixture(JOBS)


def call(xla, kind, arrays, outputs, handler=None, **attributes):
    """Calls the handler like XLA, with the GPU's context current."""
    operation = {"operation": BY_NAME[kind].code, **attributes}
    with device().current():
        handler = handler or LIBRARY.horoplug_jax_run
        return xla.call(handler, arrays, outputs, **{**OPERATION, **operation})


def values(dtype, shape, key=0):
    """This rank's array of small integers, whose sums are exact in every dtype."""
    made = np.random.default_rng([key, hvd.rank()]).integers(0, 5, shape)
    return np.asarray(made).astype(dtype)


def check_results(dtype):
    """The results of all operations in a program equal those for NumPy arrays."""
    rank, size = hvd.rank(), hvd.size()
    position = {"size": size, "rank": rank}
    for old in False, True:
        xla = Xla(device().stream, device().ordinal, old)
        for n, shape in enumerate([(2 * size, 3), (size + 1,), (1000 * size, 7), (0, 2)]):
            mine = values(dtype, shape, n)
            even = mine[: shape[0] // size * size]
            cases = {
                "allreduce": (mine, on_host.allreduce(mine, op=hvd.Sum), {}),
                "broadcast": (mine, on_host.broadcast(mine, size - 1), {"root": size - 1}),
                "allgather": (mine, on_host.allgather(mine), position),
                "alltoall": (even, on_host.alltoall(even), position),
                "reducescatter": (mine, on_host.reducescatter(mine, op=hvd.Sum), position),
            }
            for kind, (given, expected, attributes) in cases.items():
                array = device().array(given)
                output = device().empty(expected.shape, expected.dtype)
                assert call(xla, kind, [array], [output], **attributes) is None
                # XLA may reuse the input's memory in its next work in the stream.
                write(array, 99)
                found = output.numpy()
                assert found.tobytes() == expected.tobytes(), (kind, shape, found, expected)
                array.free()
                output.free()


def write(array, values):
    """Writes to an array in stream order."""
    values = np.broadcast_to(np.asarray(values, array.dtype), array.shape).copy()
    if array.nbytes:
        address, size = ctypes.c_uint64(array.address), ctypes.c_size_t(array.nbytes)
        stream = ctypes.c_void_p(device().stream)
        data = values.ctypes.data_as(ctypes.c_void_p)
        device().call("cuMemcpyHtoDAsync_v2", address, data, size, stream)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_results_match_numpy(device_ranks, dtype):
    device_ranks.run(check_results, dtype)


def check_groups_in_place():
    """The arrays of a pytree with the inputs as outputs, as XLA passes them to allreduce and broadcast."""
    mine = [values("float32", (n, 3), n) for n in range(1, 9)]
    xla = Xla(device().stream, device().ordinal)
    arrays = [device().array(each) for each in mine]
    assert call(xla, "allreduce", arrays, arrays, reduce_op=hvd.Average, name="allreduce.x") is None
    expected = on_host.grouped_allreduce(mine, name="y")
    for array, wanted in zip(arrays, expected, strict=True):
        assert array.numpy().tobytes() == wanted.tobytes()


def test_in_place_groups(device_ranks):
    device_ranks.run(check_groups_in_place)


def check_order():
    """Calls return while the GPU runs nothing: the host waits for the other ranks only. The work in the stream before
    and after the calls then runs in order."""
    xla = Xla(device().stream, device().ordinal)
    size, mine = hvd.size(), values("float32", (1000,))
    expected = {
        "allreduce": on_host.allreduce(mine, op=hvd.Sum),
        "allgather": on_host.allgather(mine),
    }
    arrays = {kind: (device().array(mine), device().empty(e.shape)) for kind, e in expected.items()}

    def begin(kind):
        array, output = arrays[kind]
        write(array, mine)
        assert call(xla, kind, [array], [output], size=size, rank=hvd.rank()) is None
        write(array, 1)

    for kind in expected:  # connects the ranks and loads the kernels
        begin(kind)
    device().synchronize()
    waits = device().host_waits()
    device().hold()
    device().delay(0.1)
    for kind in expected:
        begin(kind)
    assert device().host_waits() == waits
    device().resume()
    for kind, wanted in expected.items():
        assert arrays[kind][1].numpy().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("ranks", ["1 rank", "2 ranks"])
def test_calls_do_not_wait_for_the_gpu(job, ranks):
    with job(*JOBS[ranks]) as made:
        made.run(check_order)


def check_rows_known_after_the_call():
    """Outside of programs, ranks may have different numbers of rows: a second call copies the results."""
    xla = Xla(device().stream, device().ordinal)
    rank, size = hvd.rank(), hvd.size()
    mine = values("float32", (rank + size + 1, 3))
    splits = [rank + 1] + [1] * (size - 1)  # one row is left over
    expected = {
        ("allgather", ()): (on_host.allgather(mine), [r + size + 1 for r in range(size)]),
        ("alltoall", tuple(splits)): on_host.alltoall(mine, splits=splits),
    }
    before = used()
    for (kind, counts), (wanted, rows) in expected.items():
        array, empty = device().array(mine), device().empty((0, 3))
        with gpu._eager_call(f"{kind}.x", counts) as eager_call:
            assert (
                eager_call.run(call, xla, kind, [array], [empty], eager_call=eager_call.number)
                is None
            )
            write(array, 1)
            assert eager_call.row_counts(0, size) == list(rows)
            output = device().empty(wanted.shape)
            copy = LIBRARY.horoplug_jax_copy_results
            arrays = [empty], [output]
            assert (
                eager_call.run(call, xla, kind, *arrays, copy, eager_call=eager_call.number) is None
            )
        assert output.numpy().tobytes() == wanted.tobytes()
        array.free()
        output.free()
    assert used() == before
    with gpu._eager_call("allreduce.refused", ()) as eager_call:
        array = device().array(mine)

        def refused():
            failure = call(
                xla, "allreduce", [array], [array], eager_call=eager_call.number, reduce_op=99
            )
            assert failure is None, "XLA must not get the failure"

        with pytest.raises(ValueError, match="reduction"):
            eager_call.run(refused)


def used():
    """Bytes of GPU memory in use after all work is complete, without the core's own memory."""
    device().synchronize()
    return device()._driver.simulated_gpu_bytes_used(device().ordinal)


def test_operations_whose_row_counts_are_known_after_the_call(device_ranks):
    device_ranks.run(check_rows_known_after_the_call)


def check_failures():
    """Failures become XLA errors that name the operation, and the next call works."""
    xla = Xla(device().stream, device().ordinal)
    rank, size = hvd.rank(), hvd.size()
    array = device().array(np.ones((2, 3), np.float32))

    def failure(kind="allreduce", outputs=None, **attributes):
        named = {"name": f"{kind}.x", **attributes}
        return call(xla, kind, [array], outputs or [array], **named)

    for function, what in ("stream", "a stream"), ("ordinal", "the device"):
        with xla.without(function):
            reason = f"no {what.split()[-1]} today"
            assert failure() == f"'allreduce.x': XLA does not provide {what}: {reason}"
    with device().capturing():
        refused = failure()
        assert "'allreduce.x': a CUDA graph is being captured" in refused
    assert "'broadcast.x': root rank 9 does not exist" in failure("broadcast", root=9)
    assert "compiled for rank 3 of 4" in failure(size=4, rank=3)
    wrong = device().empty((5, 3))
    assert "another shape" in failure(outputs=[wrong])
    assert "another shape" in failure("reducescatter", [wrong], size=size, rank=rank)
    assert "'allgather.x' inside of jax.jit needs the same number of rows" in failure(
        "allgather", [wrong]
    )
    if size > 1:
        elsewhere = Xla(device().stream, 1 - device().ordinal)
        text = call(elsewhere, "allreduce", [array], [array], name="allreduce.x")
        assert f"on cuda:{1 - rank}, and this rank's others are on cuda:{rank}" in text
        other = device().array(np.ones(3 + rank, np.float32))
        text = call(xla, "allreduce", [other], [other], name="allreduce.y")
        assert "a Horovod operation has failed" in text
        assert "allreduce.y" in text
        rows = call(xla, "allgather", [other], [device().empty((7,))], name="allgather.y")
        assert "by rank [3, 4]" in rows
    assert failure() is None
    device().fail("cuMemcpyDtoDAsync", 700)
    try:
        text = failure("allgather", [device().empty((2 * size, 3))])
    finally:
        device().fail("cuMemcpyDtoDAsync", 0)
    assert "cuMemcpyDtoDAsync" in text
    # The handler does nothing in other stages than execution.
    assert xla.call(LIBRARY.horoplug_jax_run, [array], [array], stage=1) is None
    assert xla.traits(LIBRARY.horoplug_jax_run) == (0, 3, 0), "must not be part of CUDA graphs"


@pytest.mark.parametrize("ranks", ["1 rank", "2 ranks"])
def test_failures_name_the_operation(job, ranks):
    with job(*JOBS[ranks]) as made:
        made.run(check_failures)


def check_call_after_shutdown():
    """A call after a shutdown is an error, and the next job can use the GPU again."""
    xla = Xla(device().stream, device().ordinal)
    array = device().array(np.ones(3, np.float32))
    assert call(xla, "allreduce", [array], [array]) is None
    hvd.shutdown()
    assert "use hvd.init()" in call(xla, "allreduce", [array], [array])
    hvd.init()
    assert call(xla, "allreduce", [array], [array]) is None
    assert array.numpy().tolist() == [hvd.size() ** 2] * 3


def test_call_after_shutdown(job):
    with job("aa", 2) as ranks:
        ranks.run(check_call_after_shutdown)


# ---- programs for CUDA ----------------------------------------------------------------------------------------------


def lowered(function, *arguments):
    """The custom calls of a program for CUDA, in order: result and operand of the token, and the attributes of each."""
    traced = jax.jit(function).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    pattern = r"%(\S+?)(?::\d+)? = stablehlo\.custom_call @horoplug_run\(%([^,]+),.*?mhlo\.backend_config = \{(.*?)\}"
    calls = re.findall(pattern, text)
    assert len(calls) == text.count("custom_call @horoplug")
    return [
        (result, token, dict(re.findall(r"(\w+) = (\"[^\"]*\"|[^,]+)", attributes)))
        for result, token, attributes in calls
    ]


def check_lowering_for_cuda():
    def several(x):
        reduced = hvd.allreduce(x, name="a", op=hvd.Sum, prescale_factor=0.5)
        hvd.allgather(x, name="unused")
        return hvd.broadcast(x, 0, name="c"), reduced, hvd.reducescatter(x, name="d")

    calls = lowered(several, jnp.ones((4, 2)))
    names = [attributes["name"] for *_, attributes in calls]
    assert names == ['"allreduce.a"', '"allgather.unused"', '"broadcast.c"', '"reducescatter.d"']
    for (before, *_), (_, token, _) in itertools.pairwise(calls):
        assert token == f"{before}#0"
    for *_, attributes in calls:
        assert (attributes["on_gpu"], attributes["eager_call"]) == ("1 : i64", "0 : i64")
    assert calls[0][2]["prescale"] == "5.000000e-01 : f64"
    assert calls[0][2]["operation"] == f"{BY_NAME['allreduce'].code} : i64"
    on_cpu = jax.jit(several).lower(jnp.ones((4, 2))).as_text()
    assert on_cpu.count("on_gpu = 0 : i64") == 4

    # The handlers are registered under XLA's name of the platform when JAX's CUDA plugin is loaded.
    handlers = {}
    xla_client.register_custom_call_handler(
        "CUDA", lambda name, fn, platform, version, *_: handlers.update({name: (platform, version)})
    )
    mine = {name: found for name, found in handlers.items() if name.startswith("horoplug")}
    assert mine == {"horoplug_run": ("CUDA", 1), "horoplug_copy_results": ("CUDA", 1)}

    # Loops, branches, gradients and pytrees.
    def step(x):
        value, grads = hvd.distributed_value_and_grad(lambda w: (w["a"] * w["b"].sum()).sum())(
            {"a": x, "b": 2 * x}
        )
        return jax.lax.cond(value > 0, lambda: hvd.allreduce(x), lambda: x), grads

    names = [attributes["name"] for *_, attributes in lowered(step, jnp.ones(3))]
    assert names == ['"allreduce.distributed_value_and_grad.2.0"', '""']
    gradient = jax.grad(lambda x: (hvd.allgather(x, name="g") ** 2).sum())
    names = [attributes["name"] for *_, attributes in lowered(gradient, jnp.ones((3, 2)))]
    assert names == ['"allgather.g"', '"allreduce.g.gradient"']
    for platform in "tpu", "rocm":
        with pytest.raises(NotImplementedError, match="runs on CPUs and on NVIDIA GPUs"):
            jax.jit(hvd.allreduce).trace(jnp.ones(2)).lower(lowering_platforms=(platform,))
    # Operations that depend on other ranks or on the values of an array cannot be compiled.
    with pytest.raises(TypeError, match="splits= must be known when alltoall is traced"):
        lowered(lambda x: hvd.alltoall(x, splits=x), jnp.ones(3, jnp.int32))
    with pytest.raises(TypeError, match="broadcast_parameters cannot be used inside of"):
        lowered(hvd.broadcast_parameters, jnp.ones(3))


def test_lowering_for_cuda(pool):
    with pool.ranks(1) as ranks:
        ranks.run(check_lowering_for_cuda)


# ---- eager calls, with arrays on CPUs -------------------------------------------------------------------------------


@contextlib.contextmanager
def treat_as_on_gpu():
    original = gpu.is_on_gpu
    gpu.is_on_gpu = lambda array: isinstance(array, jax.Array)
    try:
        yield
    finally:
        gpu.is_on_gpu = original


def run_as_on_gpu(check, *arguments):
    """Runs a check of another module with its CPU arrays treated as arrays on a GPU."""
    with treat_as_on_gpu():
        check(*arguments)
    assert gpu._CALL_NUMBERS._next - 1 == len(gpu._CALL_NUMBERS._free), "leaked call numbers"


CHECKS = {
    "shapes": (jax_ops.check_shapes, seed()),
    "trees": (jax_ops.check_trees, seed()),
    "rows": (jax_ops.check_rows,),
    "refusals": (jax_ops.check_refusals,),
    "sets": (jax_ops.check_sets,),
    "after a program": (jax_programs.check_call_after_program,),
    "threads": (jax_programs.check_threads, seed()),
    "transforms": (jax_programs.check_transforms,),
}


@pytest.mark.parametrize("check", CHECKS)
def test_checks_of_other_modules_with_eager_calls(ranks, check):
    ranks.run(run_as_on_gpu, *CHECKS[check])


def check_broadcast_of_parameters():
    """Broadcast of parameters in host memory and in GPU memory, which are separate operations."""
    rank = hvd.rank()
    params = {
        "w": jnp.full((3, 2), 1.0 + rank),
        "host": np.full(4, 2.0 + rank, np.float32),
        "key": jax.random.key(5 + rank),
        "n": rank,
    }
    found = hvd.broadcast_parameters(params, root_rank=1)
    assert found["w"].tolist() == [[2.0, 2.0]] * 3
    assert isinstance(found["w"], jax.Array)
    assert found["host"].tolist() == [3.0] * 4
    assert not isinstance(found["host"], jax.Array)
    assert jax.random.key_data(found["key"]).tolist() == [0, 6]
    assert found["n"] == 1
    # The other rank calls two operations.
    x = np.ones(2, np.float32)
    if rank == 0:
        mixed = [x, jnp.asarray(x)]
        call = calls.allreduce(None, "pair", hvd.Sum, 1.0, 1.0, hvd.global_process_set)
        results = [output for output, _ in eager.perform("allreduce", mixed, call)]
    else:
        results = [on_host.allreduce(x, name=name, op=hvd.Sum) for name in ("pair", "pair.gpu")]
    assert [result.tolist() for result in results] == [[2.0, 2.0]] * 2


def test_broadcast_of_parameters(ranks):
    ranks.run(run_as_on_gpu, check_broadcast_of_parameters)


def check_exceptions():
    """Failures raise the same exceptions as for arrays on CPUs, also for an input that is the result of a failed
    program, and later operations work."""
    rank = hvd.rank()
    same = np.ones(2, np.float32)
    for attempt in range(2):
        with pytest.raises(
            hvd.HorovodInternalError, match=r"allreduce\.x.*rank 1|rank 1.*allreduce\.x"
        ):
            hvd.allreduce(jnp.ones(2 + rank + attempt), name="x")
        assert hvd.allreduce(jnp.asarray(same), name="x").tolist() == same.tolist()
    failed = jax.jit(lambda x: hvd.allreduce(x @ x, name="y"))
    with pytest.raises(RuntimeError):
        hvd.allreduce(failed(jnp.ones((200 + rank, 200 + rank))), name="z")
    assert hvd.allreduce(jnp.asarray(same), name="x").tolist() == same.tolist()


def test_exceptions_match_those_on_cpus(ranks):
    ranks.run(run_as_on_gpu, check_exceptions)


class NotReady:
    def is_ready(self):
        return False


class OnHost:
    """A NumPy array with the interface of a GPU array."""

    def __init__(self, array):
        self.address, self.shape, self.dtype = array.ctypes.data, array.shape, array.dtype


def check_interrupt():
    """After an interrupt before the handler has returned, the operation continues and its number is not used again."""
    x = np.ones(2, np.float32)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt), gpu._eager_call("allgather.x", ()) as eager_call:
        eager_call.run(lambda: [NotReady()])
    xla = Xla(stream=0, device=0)
    operation = {**OPERATION, "operation": BY_NAME["allgather"].code, "on_gpu": 0}
    arrays = [OnHost(x)], [OnHost(x[:0])]
    run = LIBRARY.horoplug_jax_run
    assert xla.call(run, *arrays, **{**operation, "eager_call": eager_call.number}) is None
    with gpu._eager_call("allgather.x", ()) as another:
        assert another.number != eager_call.number
        operation["eager_call"] = another.number
        assert another.run(xla.call, run, *arrays, **operation) is None
        assert another.row_counts(0, hvd.size()) == [2] * hvd.size()
    # Both have released the engine.
    hvd.shutdown()
    hvd.init()


def test_number_of_an_interrupted_call_is_not_reused_while_its_handler_runs(pool):
    with pool.ranks(2) as ranks:
        ranks.run(check_interrupt)


def pending(victim):
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with treat_as_on_gpu():
        hvd.allgather(jnp.ones(10), name="waiting")


def test_killed_rank_is_reported(pool):
    with pool.ranks(2) as job:
        outcomes = job.outcomes(pending, 1)
        assert outcomes[0].kind == "HorovodInternalError"
        assert "rank 1" in outcomes[0].message
