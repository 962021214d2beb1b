"""The Python module over the C ABI, at one rank and at two ranks that are threads of this process."""

import ast
import contextlib
import gc
import inspect
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from horoplug import _native
from horoplug._native import Engine, EngineConfig, Error, Op, ReduceOp, Status
from tests.harness.limits import scaled
from tests.harness.support import once_this_thread_waits, until

ALLREDUCE, ALLGATHER = Op.ALLREDUCE, Op.ALLGATHER
FLOAT32 = 7
SUM = ReduceOp.SUM


def tensor(array, output=None):
    return (array.ctypes.data, 0 if output is None else output.ctypes.data, array.shape)


@pytest.fixture
def engine():
    made = Engine(EngineConfig())
    yield made
    made.shutdown()


@contextlib.contextmanager
def two_engines(**options):
    """The engines of ranks 0 and 1, connected as if on two hosts."""
    ends = socket.socketpair()

    def start(rank):
        peer = (1 - rank, 1 - rank, ends[rank].detach(), -1, -1)
        config = EngineConfig(rank=rank, size=2, host=rank, peers=[peer], **options)
        return Engine(config)

    with ThreadPoolExecutor(2) as pool:
        engines = list(pool.map(start, range(2)))
        yield engines
        list(pool.map(Engine.shutdown, engines))


def test_stub_and_module_have_the_same_names():
    """The .pyi has exactly the names of the module, with the same argument names."""
    stub = ast.parse(Path(_native.__file__).with_name("_native.pyi").read_text())
    declared = {}
    for node in stub.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            declared[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            declared[node.target.id] = node
    assert {name for name in vars(_native) if not name.startswith("__")} == set(declared)
    for name in "EngineConfig", "Status", "Op", "ReduceOp":
        members = [
            (item.targets[0] if isinstance(item, ast.Assign) else item.target).id
            for item in declared[name].body
            if isinstance(item, (ast.Assign, ast.AnnAssign))
        ]
        kind = getattr(_native, name)
        present = getattr(kind, "__members__", None) or vars(kind)
        assert {item for item in present if not item.startswith("_")} == set(members)
    for name in "Memory", "Result", "Engine":
        members = {item.name for item in declared[name].body if isinstance(item, ast.FunctionDef)}
        present = {item for item in vars(getattr(_native, name)) if not item.startswith("_")}
        assert present == {member for member in members if not member.startswith("_")}
    for method in declared["Engine"].body:
        if isinstance(method, ast.FunctionDef):
            arguments = [a.arg for a in method.args.args[1:] + method.args.kwonlyargs]
            present = getattr(Engine, method.name)
            if getattr(present, "__text_signature__", None):
                assert [*inspect.signature(present).parameters][1:] == arguments
            else:  # pybind11's own format
                assert [a for a in arguments if f"{a}:" not in present.__doc__] == []


def test_cpu_kernels_are_the_best_that_the_processor_and_the_system_have():
    """Linux lists an instruction set only if it also saves its registers."""
    listed = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)
    flags = set(listed[1].split()) if listed else set()
    best = "baseline"
    if {"avx2", "f16c"} <= flags:
        best = "avx2"
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
            best = "avx512"
    code = "from horoplug import _native; print(_native.cpu_kernels())"
    variables = {k: v for k, v in os.environ.items() if k != "HOROPLUG_CPU_KERNELS"}
    assert (
        subprocess.check_output([sys.executable, "-c", code], env=variables, text=True).strip()
        == best
    )


def test_module_constants():
    assert _native.ABI_VERSION == 3
    assert _native.dtype_size(FLOAT32) == 4
    assert _native.dtype_size(99) == 0
    for line in _native.algorithms().splitlines():
        assert len(line.split()) == 3


def test_dtypes_are_numbered_from_zero():
    rows = _native.dtypes()
    assert [code for code, *_ in rows] == list(range(len(rows)))
    assert (FLOAT32, "float32", 4) in [row[:3] for row in rows]


def test_engine_config_rejects_unknown_settings_and_wrong_types():
    config = EngineConfig(rank=1, fusion_threshold=5)
    assert (config.rank, config.size, config.fusion_threshold) == (1, 1, 5)
    with pytest.raises(TypeError, match="none of its attributes"):
        EngineConfig(rang=1)
    with pytest.raises(TypeError, match="rank has a wrong type"):
        EngineConfig(rank="1")


def test_settings_are_checked_by_the_core():
    off = EngineConfig(plan_after=0, autotune=False, operation_timeout=0, algorithm=None)
    assert (off.plan_after, off.autotune, off.operation_timeout) == (0, False, 0)
    Engine(off).shutdown()
    with pytest.raises(Error, match="plan_after is 70000; it must be from 0 to 65536 steps"):
        Engine(EngineConfig(plan_after=70000))


def test_allreduce_on_one_rank(engine):
    source, target = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((2, 3), np.float32)
    handle = engine.submit(ALLREDUCE, FLOAT32, [tensor(source, target)], "sum", SUM, prescale=2.0)
    engine.wait(handle)
    assert engine.poll(handle)
    assert (target == 2 * source).all()
    assert engine.result(handle).memory is None
    engine.release(handle)


def test_perform_waits_and_releases_the_handle(engine):
    array = np.ones(3, np.float32)
    arguments = ALLREDUCE, FLOAT32, [tensor(array, array)], "x", SUM
    assert engine.perform(*arguments, prescale=2.0, keep=False) == 0
    assert array.tolist() == [2, 2, 2]
    handle = engine.perform(*arguments)
    assert engine.poll(handle)
    engine.release(handle)
    with pytest.raises(Error):
        engine.perform(99, FLOAT32, [])


def test_perform_returns_the_handle_of_a_slow_operation():
    arrays = [np.full(10, rank + 1, np.float32) for rank in range(2)]
    with two_engines() as engines:
        arguments = [(ALLREDUCE, FLOAT32, [tensor(a, a)], "x", SUM) for a in arrays]
        handle = engines[0].perform(
            *arguments[0], keep=False
        )  # the other rank has not submitted yet
        assert handle > 0
        assert not engines[0].poll(handle)
        assert engines[1].perform(*arguments[1], keep=False) == 0
        engines[0].wait(handle)
        assert all((array == 3).all() for array in arrays)


def test_result_memory_is_handed_over_once(engine):
    source = np.arange(6, dtype=np.float32).reshape(3, 2)
    handle = engine.submit(ALLGATHER, FLOAT32, ((tensor(source)),), name="gather")
    engine.wait(handle)
    result = engine.result(handle)
    assert (result.rows, result.row_counts) == (3, [3])
    assert engine.result(handle).memory is None  # handed over once
    engine.release(handle)
    view = memoryview(result.memory)
    assert (view.format, view.nbytes, view.readonly) == ("B", 24, False)
    assert result.memory.nbytes == 24
    array = np.frombuffer(result.memory, np.float32)
    assert array.ctypes.data == result.memory.address
    del result, view
    gc.collect()
    assert array.tolist() == [0, 1, 2, 3, 4, 5]  # the array keeps the memory alive


def test_error_has_status_and_text_and_can_be_pickled(engine):
    with pytest.raises(Error) as caught:
        engine.submit(99, FLOAT32, [])
    assert caught.value.status == Status.INVALID_ARGUMENT
    assert caught.value.args == (Status.INVALID_ARGUMENT, caught.value.args[1])
    assert caught.value.args[1]
    with pytest.raises(Error):
        engine.wait(10**6)
    assert pickle.loads(pickle.dumps(Error(Status.MISMATCH, "text"))).status == Status.MISMATCH


@pytest.mark.parametrize(
    "tensors", [5, [(1, 2)], [(1, 2, 3)], [("address", 0, [1])], [(0, 0, ["1"])]]
)
def test_wrong_argument_types_raise_type_errors(engine, tensors):
    with pytest.raises((TypeError, ValueError)):
        engine.submit(ALLREDUCE, FLOAT32, tensors)


@pytest.mark.parametrize(
    ("arguments", "keywords", "text"),
    [
        ((ALLREDUCE, FLOAT32), {}, "'tensors' is missing"),
        ((ALLREDUCE, FLOAT32, []), {"dtype": FLOAT32}, "'dtype' is given twice"),
        ((ALLREDUCE, FLOAT32, []), {"keep": False}, "unexpected keyword argument 'keep'"),
        ((ALLREDUCE, FLOAT32, [], *[None] * 13), {}, "at most 15 arguments"),
        ((ALLREDUCE, 2**40, []), {}, "does not fit in 32 bits"),
        ((ALLREDUCE, 1.5, []), {}, "float"),
        ((ALLREDUCE, FLOAT32, [], b"x"), {}, "name must be a str"),
        ((ALLREDUCE, FLOAT32, []), {"prescale": "2"}, "real number"),
        ((ALLREDUCE, FLOAT32, []), {"splits": 3}, "splits must be a sequence"),
    ],
)
def test_arguments_that_do_not_match_the_parameters_raise_type_errors(
    engine, arguments, keywords, text
):
    with pytest.raises(TypeError, match=text):
        engine.submit(*arguments, **keywords)


def test_peers_must_match_size():
    with pytest.raises(Error) as caught:
        Engine(EngineConfig(size=2))
    assert caught.value.status == Status.INVALID_ARGUMENT


def test_submission_after_shutdown_is_an_error(engine):
    engine.shutdown()
    engine.shutdown()
    array = np.ones(1, np.float32)
    with pytest.raises(Error) as caught:
        engine.submit(ALLREDUCE, FLOAT32, [tensor(array, array)])
    assert caught.value.status == Status.SHUT_DOWN


def test_two_ranks_and_stats():
    arrays = [np.full(1000, rank + 1, np.float32) for rank in range(2)]
    with two_engines() as engines:
        handles = [
            engine.submit(ALLREDUCE, FLOAT32, [tensor(array, array)], "x", SUM)
            for engine, array in zip(engines, arrays, strict=True)
        ]
        for engine, handle in zip(engines, handles, strict=True):
            engine.wait(handle)
        assert all((array == 3).all() for array in arrays)
        stats = engines[0].stats()
    assert set(stats) == {
        "batches",
        "tensors",
        "bytes",
        "control_messages",
        "control_bytes",
        "cached_names",
        "wakeups",
        "planned_batches",
        "broken_plans",
        "failed",
        "active_microseconds",
    }
    assert (stats["tensors"], stats["bytes"]) == (1, 4000)


def test_name_in_flight_is_refused():
    arrays = [np.ones(4, np.float32) for _ in range(2)]
    with two_engines() as engines:
        handle = engines[0].submit(ALLREDUCE, FLOAT32, [tensor(arrays[0], arrays[0])], "x", SUM)
        assert not engines[0].poll(handle)
        with pytest.raises(Error) as caught:
            engines[0].submit(ALLREDUCE, FLOAT32, [tensor(arrays[0], arrays[0])], "x", SUM)
        assert caught.value.status == Status.DUPLICATE_NAME
        engines[1].submit(ALLREDUCE, FLOAT32, [tensor(arrays[1], arrays[1])], "x", SUM)
        engines[0].wait(handle)


def test_abort_reaches_a_waiting_thread():
    array = np.ones(4, np.float32)
    with two_engines() as engines:
        handle = engines[0].submit(ALLREDUCE, FLOAT32, [tensor(array, array)], "x", SUM)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(engines[0].wait, handle)
            engines[1].abort("the reason")
            with pytest.raises(Error, match="the reason") as caught:
                waiting.result(timeout=scaled(20))
        assert caught.value.status == Status.ABORTED


def test_keyboard_interrupt_ends_a_wait():
    array = np.ones(4, np.float32)
    with two_engines() as engines:
        handle = engines[0].submit(ALLREDUCE, FLOAT32, [tensor(array, array)], "x", SUM)
        with (
            once_this_thread_waits(os.kill, os.getpid(), signal.SIGINT),
            pytest.raises(KeyboardInterrupt),
        ):
            engines[0].wait(handle)


def test_log_callback_receives_messages():
    seen = []
    logged = threading.Event()

    def log(level, text):
        seen.append((level, text))
        logged.set()

    with two_engines(log=log, log_level=1) as engines:
        engines[0].abort("the reason")
        assert logged.wait(scaled(20))
    for level, text in seen:
        assert 1 <= level <= 5
        assert isinstance(text, str)


def test_failing_log_callback_is_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda report: reported.append(str(report.exc_value))
    )

    def log(level, text):
        raise RuntimeError("from the callback")

    with two_engines(log=log, log_level=1) as engines:
        engines[0].abort("the reason")
        del engines[:]
        gc.collect()  # the end of the engines delivers the log messages
    assert "from the callback" in reported


def run_script(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_process_exits_with_a_logging_engine_and_a_waiting_thread():
    """Interpreter exit neither hangs nor crashes while an engine and a thread are running."""
    run_script(
        """
        import socket, sys, threading
        from horoplug._native import Engine, EngineConfig

        ends = [end.detach() for end in socket.socketpair()]
        engines = [None, None]

        def start(rank):
            peers = [(1 - rank, 1 - rank, ends[rank], -1, -1)]
            config = EngineConfig(rank=rank, size=2, host=rank, peers=peers)
            config.log_level, config.log = 1, lambda level, text: None
            engines[rank] = Engine(config)

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        data = bytearray(4)
        import ctypes
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        handle = engines[0].submit(0, 7, [(address, address, (1,))], "x", 1)
        sys.setswitchinterval(3600)  # the main thread continues only when the thread releases the GIL to wait
        threading.Thread(target=engines[0].wait, args=(handle,), daemon=True).start()
        """
    )


def test_forked_child_cannot_use_the_engine_and_exits():
    text = run_script(
        """
        import os, sys
        from horoplug._native import Engine, EngineConfig, Error

        engine = Engine(EngineConfig(log=print))
        child = os.fork()
        if not child:
            try:
                engine.stats()
            except Error as error:
                print(error.args[1], flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        engine.shutdown()
        """
    )
    assert "parent process" in text


def test_hundreds_of_engines_leak_nothing():
    def count(what):
        return len(os.listdir(f"/proc/self/{what}"))

    def once():
        with two_engines(log=print):
            pass
        gc.collect()

    once()
    descriptors, threads = count("fd"), count("task")
    # The collections in the loop then look at new objects alone. All modules of a session together take half a second.
    gc.freeze()
    try:
        for _ in range(100):
            once()
    finally:
        gc.unfreeze()
    assert count("fd") == descriptors
    # The kernel may still count a thread for a moment after it was joined.
    until(lambda: count("task") <= threads)
