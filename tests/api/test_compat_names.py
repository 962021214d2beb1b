"""The names in Horovod's modules that programs use, and the functions that only horoplug.compat has."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from horoplug.common import reduce_ops
from horoplug.compat import env, secret, threads, timeout, util
from horoplug.compat.basics import HorovodBasics
from tests.harness.limits import scaled
from tests.harness.support import environment

pytest_plugins = ["tests.harness.jobs"]


def run_compat(code):
    code = "import horoplug.compat; horoplug.compat.install()\n" + code
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=scaled(150),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.short
def test_every_horovod_name_is_decided():
    """Each name of Horovod is an attribute, or a line says what to use instead; never both."""
    run_compat("""
import importlib
from horoplug.compat import attributes, decisions, names, surface

modules = {*names.MODULES, "horovod", "horovod.runner"}
assert {*surface.OWN, *surface.IMPORTED} <= modules
tables = [of for of, _ in decisions.LACKING], *decisions.EQUIVALENTS.values()
assert {module for table in tables for module in table} <= modules
for module in sorted(modules):
    known = attributes.names_of(module)
    lacking = attributes.lacking_in(module)
    assert {*lacking} <= known, module
    # What Horovod does not have, but programs of older versions may use.
    assert {*attributes.equivalents_of(module)} <= known | {
        "BroadcastGlobalVariablesHook", "broadcast_global_variables"
    }, module
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:  # the part needs a package that is not installed here
        assert "pip install" in str(error) or module.endswith("sync_batch_norm"), (module, error)
        assert module.split(".")[1] in ("mxnet", "ray", "spark") or "sync_batch" in module, (module, error)
        continue
    for name in sorted(known):
        refusal = attributes.refusal(module, name)
        assert refusal.startswith("horoplug does not provide ") and "\\n" not in refusal
        if hasattr(loaded, name):
            assert name not in lacking, (module, name)
            exec(f"from {module} import {name}")
            continue
        assert name in lacking or name in attributes.imported_by_horovod(module), (module, name)
        try:
            exec(f"from {module} import {name}")
        except ImportError as error:
            assert str(error) == refusal, (module, name, error)
        else:
            raise AssertionError((module, name))
""")


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        ("horovod.torch.mpi_ops", "_allreduce_async", "without the leading underscore"),
        ("horovod.torch.optimizer", "nonsense", None),
        ("horovod.runner.launch", "gloo_run", "horovod.runner.gloo_run.gloo_run yet"),
        ("horovod.tensorflow.mpi_ops", "_setup_process_sets", "process_sets._setup: init()"),
    ],
)
@pytest.mark.short(failure=True)
def test_missing_name_is_one_line(module, name, reason):
    text = run_compat(f"""
import importlib
module = importlib.import_module({module!r})
try:
    module.{name}
except AttributeError as error:
    print(error)
try:
    from {module} import {name}
except ImportError as error:
    print(error)
""")
    by_attribute, by_import = text.splitlines()
    if reason is None:
        assert "has no attribute 'nonsense'" in by_attribute
        assert "cannot import name 'nonsense'" in by_import
    else:
        assert by_attribute == by_import
        assert reason in by_attribute


def test_page_of_names_is_up_to_date(tmp_path):
    """docs/horovod-names.md is what scripts/horovod_names.py writes."""
    page = tmp_path / "page.md"
    script = Path(__file__).parents[2] / "scripts" / "horovod_names.py"
    command = [sys.executable, script, "--page", page]
    subprocess.run(command, env=environment(), check=True, timeout=scaled(60))
    assert page.read_text() == (script.parents[1] / "docs" / "horovod-names.md").read_text()


# ---- private names that programs use ---------------------------------------------------------------------------------


def test_private_functions_of_horovod_tensorflow(pool):
    def check():
        import tensorflow as tf

        import horoplug.compat

        horoplug.compat.install()
        import horovod.tensorflow as hvd

        rank = hvd.rank()
        ones = tf.ones((2, 1)) * (rank + 1)
        assert hvd._allreduce(ones).numpy().tolist() == [[3], [3]]  # the default is the sum
        assert hvd.mpi_ops._allreduce(ones, op=hvd.Average).numpy().tolist() == [[1.5], [1.5]]
        first, _ = hvd._grouped_allreduce([ones, ones], prescale_factor=2.0)
        assert first.numpy().tolist() == [[6], [6]]
        assert hvd._reducescatter(ones).numpy().tolist() == [[3]]
        assert hvd._grouped_reducescatter([ones])[0].numpy().tolist() == [[3]]
        assert hvd._allreduce_cond(ones, op=hvd.Sum).numpy().tolist() == [[3], [3]]
        assert hvd._grouped_allreduce_cond([ones], op=hvd.Sum)[0].numpy().tolist() == [[3], [3]]
        variables = [tf.Variable(float(rank)), tf.Variable([rank, rank])]
        hvd.functions._make_broadcast_group_fn()(variables, 1, hvd.global_process_set)
        assert [v.numpy().tolist() for v in variables] == [1, [1, 1]]
        variables[0].assign(rank)
        make = hvd.functions._make_inplace_broadcast_group_fn
        make()([variables[:1], variables[1:]], 1, hvd.global_process_set)
        assert variables[0].numpy() == 1

        @tf.function
        def graph(x):
            y, _ = hvd.alltoall(x, splits=[1, 1])
            of_alltoall = hvd.mpi_ops._alltoall_grad(y.op, tf.ones((2, 1)) * (rank + 1), None)
            z = hvd._allreduce(x)
            return of_alltoall[0], hvd.mpi_ops._allreduce_grad(z.op, tf.ones((2, 1)))

        of_alltoall, of_allreduce = graph(ones)
        assert of_alltoall.numpy().tolist() == [[1], [2]]
        assert of_allreduce.numpy().tolist() == [[2], [2]]
        assert issubclass(hvd._DistributedOptimizer, hvd._LegacyOptimizer)
        aggregation = __import__("horovod.tensorflow.gradient_aggregation", fromlist=["x"])
        assert aggregation.get_not_none_from_list([1, None]) == [1]
        assert aggregation.apply_op_to_not_none_tensors(pow, [2, None], 3) == [8, None]

    with pool.ranks(2) as ranks:
        ranks.run(check)


def test_autograd_functions_of_horovod_torch(pool):
    def check():
        import torch

        import horoplug.compat

        horoplug.compat.install()
        from horovod.torch import mpi_ops as ops

        everyone, rank = ops.global_process_set, ops.rank()

        def value():
            return torch.full((2, 1), float(rank + 1), requires_grad=True)

        def check(result, expected, x, gradient):
            assert result.tolist() == expected
            result.sum().backward()
            assert x.grad.tolist() == gradient

        def scaled(factor):
            return [[factor], [factor]]

        arguments = None, None, ops.Sum, 1.0, 1.0, everyone
        x = value()
        check(ops.HorovodAllreduce.apply(x, *arguments), scaled(3), x, scaled(2))
        x = value()
        check(ops.HorovodGroupedAllreduce.apply(*arguments, x)[0], scaled(3), x, scaled(2))
        x = value()
        every = [[1], [1], [2], [2]]
        check(ops.HorovodAllgather.apply(x, None, everyone), every, x, scaled(1))
        x = value()
        check(ops.HorovodGroupedAllgather.apply(None, everyone, x)[0], every, x, scaled(1))
        x = value()
        check(ops.HorovodBroadcast.apply(x, 1, None, everyone), scaled(2), x, scaled(rank))
        x = value()
        y, splits = ops.HorovodAlltoall.apply(x, None, None, everyone)
        assert splits.tolist() == [1, 1]
        check(y, [[1], [2]], x, scaled(1))
        x = value()
        scatter = ops.HorovodReducescatter.apply(x, None, ops.Sum, everyone, 1.0, 1.0)
        check(scatter, [[3]], x, scaled(2))
        x = value()
        (scatter,) = ops.HorovodGroupedReducescatter.apply(None, ops.Sum, everyone, 1.0, 1.0, x)
        check(scatter, [[3]], x, scaled(2))

    with pool.ranks(2) as ranks:
        ranks.run(check)


def test_digests():
    key = secret.make_secret_key()
    digest = secret.compute_digest(key, b"message")
    assert len(digest) == secret.DIGEST_LENGTH
    assert secret.check_digest(key, b"message", digest)
    assert not secret.check_digest(key, b"another", digest)


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
    for name in ("torch", "tensorflow", "keras", "jax", "mxnet"):
        installed = importlib.util.find_spec(name) is not None
        assert util.extension_available(name) == installed
    assert not util.extension_available("numpy")
    assert util.gpu_available("mxnet") is False
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
    with pytest.raises(ImportError, match=r"does not provide horovod\.paddle"):
        util.check_extension("horovod.paddle", "HOROVOD_WITH_PADDLE", __file__, "mpi_lib")
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
    threads.in_thread(seen.append, (3,)).join(scaled(10))
    assert seen == [3]
    assert threads.in_thread(seen.clear, name="name").name == "name"
    thread = threads.in_thread(lambda: 1 / 0, silent=True)
    thread.join(scaled(10))
    assert thread.daemon
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="args must be a tuple"):
        threads.in_thread(seen.append, 3)


def test_on_event():
    event, stop, called = threading.Event(), threading.Event(), threading.Event()
    thread = threads.on_event(event, called.set, stop=stop, check_stop_interval_s=0.01)
    event.set()
    thread.join(scaled(10))
    assert called.is_set()
    called.clear()
    thread = threads.on_event(
        threading.Event(), called.set, stop=stop, check_stop_interval_s=0.01, daemon=False
    )
    stop.set()
    thread.join(scaled(10))
    assert not thread.is_alive()
    assert not called.is_set()
    thread = threads.on_event(event, called.set)
    thread.join(scaled(10))
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
    assert done.wait(scaled(10))
    hooked = threading.excepthook
    threading.excepthook = lambda args: None
    try:
        with pytest.raises(RuntimeError, match=r"1 calls of .* have failed"):
            run(lambda a: 1 // a, [[1], [0]], max_concurrent_executions=2)
    finally:
        threading.excepthook = hooked
