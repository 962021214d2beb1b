"""The names in Horovod's modules that programs use, and the functions that only horoplug.compat has."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import warnings

import pytest

from horoplug.common import reduce_ops
from horoplug.compat import env, threads, timeout, util
from horoplug.compat.basics import HorovodBasics
from tests.harness.support import environment

pytest_plugins = ["tests.harness.jobs"]


def test_every_horovod_name_exists():
    code = """
import horoplug.compat
horoplug.compat.install()
from horoplug.compat.names import MODULES, NAMES, PACKAGES
assert set(NAMES) <= {*MODULES, *PACKAGES}
assert set(MODULES) <= set(NAMES), "no names are known of a module"
for module, listed in NAMES.items():
    for name in listed:
        try:
            exec(f"from {module} import {name}")
        except ImportError as error:
            if "pip install" in str(error):  # the part needs a package that is not installed here
                assert module.split(".")[1] in ("ray", "spark"), (module, name, error)
                continue
            assert module.endswith("sync_batch_norm"), (module, name, error)
            # For a module that is not a package, Python's own error message cannot be extended.
            package = module in PACKAGES or any(other.startswith(module + ".") for other in MODULES)
            text = "does not provide" if package or "sync_batch" in module else "cannot import name"
            assert text in str(error), (module, name, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# ---- horovod.common.basics -------------------------------------------------------------------------------------------


def test_horovod_basics(pool):
    def check():
        import horoplug as hvd
        from horoplug.compat.basics import _basics as basics

        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
            assert getattr(basics, name)() == getattr(hvd, name)()
        assert basics.is_initialized()
        assert basics.is_homogeneous()
        assert basics._get_process_set_ids_and_ranks() == {0: [0, 1]}
        assert basics._process_set_size(0) == 2
        assert basics._process_set_rank(0) == hvd.rank()
        with pytest.raises(ValueError, match="no process set 7"):
            basics._process_set_size(7)
        with pytest.raises(ValueError, match="communicator"):
            basics._comm_process_set_id(object())
        basics.shutdown()
        assert not basics.is_initialized()
        with pytest.raises(ValueError, match="has not been initialized"):
            basics.rank()
        basics.init()

    with pool.ranks(2) as ranks:
        ranks.run(check)


def test_horovod_basics_without_a_job():
    basics = HorovodBasics(__file__, "mpi_lib_v2")
    assert [basics.Average, basics.Sum, basics.Adasum, basics.Min, basics.Max, basics.Product] == [
        *range(6)
    ]
    assert basics.gloo_built()
    assert basics.mpi_built() == (importlib.util.find_spec("mpi4py") is not None)
    assert not hasattr(basics, "nonsense")


# ---- horovod.common.util ---------------------------------------------------------------------------------------------


def test_env_functions(monkeypatch):
    monkeypatch.setenv("HOROVOD_A", "old")
    monkeypatch.delenv("HOROVOD_B", raising=False)
    with contextlib.suppress(KeyError), util.env(HOROVOD_A="new", HOROVOD_B="1", HOROVOD_C=None):
        assert (os.environ["HOROVOD_A"], os.environ["HOROVOD_B"]) == ("new", "1")
        assert "HOROVOD_C" not in os.environ
        raise KeyError
    assert os.environ["HOROVOD_A"] == "old"
    assert "HOROVOD_B" not in os.environ


def test_split_list():
    assert util.split_list([1, 2, 3, 4, 5, 6, 7], 3) == [[1, 2, 3], [4, 5], [6, 7]]
    assert util.split_list([1, 2], 3) == [[1], [2], []]
    assert util.split_list([], 2) == [[], []]
    assert util.split_list("abcd", 2) == ["ab", "cd"]


def test_num_rank_is_power_2():
    assert [n for n in range(-4, 70) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16, 32, 64]


def test_is_iterable():
    assert util.is_iterable([]) and util.is_iterable("a") and util.is_iterable(iter([]))  # noqa: PT018
    assert not util.is_iterable(3)
    assert not util.is_iterable(None)


def test_cached_functions():
    calls = []

    @util._cache
    def function(*args, **kwargs):
        calls.append((args, kwargs))
        return len(calls)

    assert [function(1), function(1), function(x=1), function(2), function(x=1)] == [1, 1, 2, 3, 2]
    assert function.__name__ == "function"


@pytest.mark.parametrize(
    ("version", "target", "newer"),
    [
        ("2.10.0", "2.9.3", True),
        ("2.9.3", "2.10.0", False),
        ("1.2", "1.2.0", True),
        ("2.1.0+cu118", "2.1.0", True),
        ("2.1.0rc1", "2.1.0", False),
        ("2.1.0.dev20240101", "2.1.0", False),
        ("2.1.1-rc1", "2.1.0", True),
        ("2.1.0.post1", "2.1.0", True),
    ],
)
def test_version_checks(version, target, newer):
    assert util.is_version_greater_equal_than(version, target) is newer


def test_unsupported_versions_are_refused():
    for wrong in ((1, "1.0.0"), ("1.0.0", 1), ("1.0.0", "1.0"), ("x", "1.0.0")):
        with pytest.raises(ValueError, match="version"):
            util.is_version_greater_equal_than(*wrong)


def test_average_backwards_compatibility():
    resolve = util.get_average_backwards_compatibility_fun(reduce_ops)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(None, None) == reduce_ops.Average
        assert resolve(reduce_ops.Sum, None) == reduce_ops.Sum
        assert resolve(op=reduce_ops.Average, average=None) == reduce_ops.Average
        with pytest.raises(ValueError, match="supersedes average"):
            resolve(reduce_ops.Average, True)
    with pytest.warns(DeprecationWarning, match="average= is deprecated"):
        assert resolve(None, False) == reduce_ops.Sum
    with pytest.warns(DeprecationWarning, match="average= is deprecated"):
        assert resolve(None, True) == reduce_ops.Average


def test_build_queries_of_horovod_util(capsys):
    assert util.gloo_built(verbose=True) is True
    assert capsys.readouterr().out == "Gloo is built in: yes\n"
    assert util.mpi_built() == (importlib.util.find_spec("mpi4py") is not None)
    assert not util.ddl_built()
    assert not util.ccl_built()
    assert isinstance(util.nccl_built(), int)
    assert capsys.readouterr().out == ""
    for name in ("torch", "tensorflow", "keras", "jax"):
        installed = importlib.util.find_spec(name) is not None
        assert util.extension_available(name) == installed
    assert not util.extension_available("numpy")
    assert not util.extension_available("mxnet")
    assert util.gpu_available("mxnet") is False
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"does not provide horovod\.mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        util.check_installed_version("torch", "0.0.1")
    assert util.get_extension_full_path("/a/b.py", "c", "d") == f"/a/c/d{util.get_ext_suffix()}"


# ---- horovod.runner --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", (0, 1)),
        ("HOROVOD_RANK=1 HOROVOD_SIZE=4 PMI_RANK=2 PMI_SIZE=8", (1, 4)),
        ("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=5", (3, 5)),
        ("PMI_RANK=2 PMI_SIZE=8", (2, 8)),
        ("PMI_RANK=2", None),
        ("HOROVOD_SIZE=2 PMI_RANK=2 PMI_SIZE=8", None),
    ],
)
def test_env_rank_and_size(monkeypatch, variables, expected):
    for prefix in "HOROVOD", "OMPI_COMM_WORLD", "PMI":
        monkeypatch.delenv(f"{prefix}_RANK", raising=False)
        monkeypatch.delenv(f"{prefix}_SIZE", raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    if expected is None:
        with pytest.raises(RuntimeError, match="only one of"):
            env.get_env_rank_and_size()
    else:
        assert env.get_env_rank_and_size() == expected


def test_env_exportable(monkeypatch):
    for name in ("BASH_FUNC_x%%", "OLDPWD", "CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY"):
        assert not env.is_exportable(name)
    for name in ("PATH", "HOROVOD_RANK", "PWD"):
        assert env.is_exportable(name)
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", env.KUBEFLOW_MPI_EXEC)
    assert env.is_kubeflow_mpi()


def test_timeout_errors():
    later = timeout.Timeout(1000, "Waited for {activity}.")
    later.check_time_out_for("nothing")
    assert not later.timed_out()
    assert 900 < later.remaining() <= 1000
    past = timeout.Timeout(-1, "Waited for {activity}.")
    assert past.timed_out()
    assert past.remaining() == 0
    with pytest.raises(
        timeout.TimeoutException, match=r"Waited for ssh\. Timeout after -1 seconds"
    ):
        past.check_time_out_for("ssh")


def test_in_thread(capsys):
    seen = []
    threads.in_thread(seen.append, (3,)).join(10)
    assert seen == [3]
    assert threads.in_thread(seen.clear, name="name").name == "name"
    thread = threads.in_thread(lambda: 1 / 0, silent=True)
    thread.join(10)
    assert thread.daemon
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="args must be a tuple"):
        threads.in_thread(seen.append, 3)


def test_on_event():
    event, stop, called = threading.Event(), threading.Event(), threading.Event()
    thread = threads.on_event(event, called.set, stop=stop, check_stop_interval_s=0.01)
    event.set()
    thread.join(10)
    assert called.is_set()
    called.clear()
    thread = threads.on_event(
        threading.Event(), called.set, stop=stop, check_stop_interval_s=0.01, daemon=False
    )
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert not called.is_set()
    thread = threads.on_event(event, called.set)
    thread.join(10)
    assert called.is_set()
    for wrong in ({"event": None}, {"args": 3}, {"daemon": False}):
        with pytest.raises(ValueError, match="must"):
            threads.on_event(**{"event": event, "func": called.set, **wrong})


def test_execute_function_multithreaded():
    arguments = [[n, 1] for n in range(20)]
    run = threads.execute_function_multithreaded
    assert run(lambda a, b: a + b, arguments, max_concurrent_executions=3) == {
        n: n + 1 for n in range(20)
    }
    assert arguments[0] == [0, 1]
    assert run(len, []) == {}
    done = threading.Event()
    assert run(done.set, [[]], block_until_all_done=False) is None
    assert done.wait(10)
    hooked = threading.excepthook
    threading.excepthook = lambda args: None
    try:
        with pytest.raises(RuntimeError, match=r"1 calls of .* have failed"):
            run(lambda a: 1 // a, [[1], [0]], max_concurrent_executions=2)
    finally:
        threading.excepthook = hooked
