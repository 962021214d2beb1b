"""The compute threads of ranks: each has its share of the processors that the ranks of its host may use."""

import json
import os
import subprocess
import sys
import types

import pytest

from horoplug.base import cgroup, thread_share
from horoplug.base.thread_share import GIVEN, RANKS, Capacity, capacity_of, share
from horoplug.common import compute_threads
from horoplug.runner.environment import give_threads
from horoplug.runner.worker_job import WorkerJob, enter, leave
from tests.harness import ROOT, program_text
from tests.harness.limits import scaled

NAMES = [each.name for each in thread_share.VARIABLES]
USERS = {*NAMES, "PJRT_NPROC", "MKL_NUM_THREADS", GIVEN, RANKS}
ENV = {name: value for name, value in os.environ.items() if name not in USERS} | {
    "PYTHONPATH": str(ROOT),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
}


def launch(*arguments, env=None, before=()):
    done = subprocess.run(
        [*before, sys.executable, "-m", "horoplug.runner", *map(str, arguments)],
        env=ENV | (env or {}),
        capture_output=True,
        text=True,
        timeout=scaled(300),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done


def outputs(done):
    """What each rank has printed, as JSON, by rank."""
    lines = (line.partition("]<stdout>:") for line in done.stdout.splitlines())
    return {int(rank[1:]): json.loads(text) for rank, _, text in lines}


# ---- the decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "quota", "ranks", "threads"),
    [
        (2, 0, 2, 1),
        (2, 0, 4, 1),
        (16, 0, 4, 4),
        (14, 0, 4, 3),
        (16, 6.0, 4, 1),
        (16, 9.5, 2, 4),
        (4, 64.0, 2, 2),
        (8, 0.5, 1, 1),
    ],
)
def test_cores_or_quota_are_divided_by_the_ranks_of_the_host(cores, quota, ranks, threads):
    assert share(Capacity(cores, quota), ranks) == threads


def given_to(monkeypatch, capacity, **env):
    monkeypatch.setattr(thread_share, "own_capacity", lambda: Capacity(*capacity))
    give_threads(env)
    return env


def test_variables_of_all_frameworks_are_set(monkeypatch):
    env = given_to(monkeypatch, (6, 0.0), **{RANKS: "2", "HOME": "/"})
    assert env == dict.fromkeys(NAMES, "3") | {"HOME": "/", GIVEN: " ".join(["3", *NAMES])}


@pytest.mark.parametrize("mine", ["OMP_NUM_THREADS", "TF_NUM_INTEROP_THREADS", "PJRT_NPROC"])
def test_variables_of_the_user_keep_their_values(monkeypatch, mine):
    env = given_to(monkeypatch, (6, 0.0), **{RANKS: "2", mine: "5"})
    replaced = "NPROC" if mine == "PJRT_NPROC" else mine
    assert env[mine] == "5"
    assert {name for name in NAMES if env.get(name) == "3"} == {*NAMES} - {replaced}


def test_one_rank_with_all_cores_is_left_alone(monkeypatch):
    assert given_to(monkeypatch, (6, 0.0), **{RANKS: "1"}) == {}
    assert given_to(monkeypatch, (6, 2.5), **{RANKS: "1"})["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("prefix", ["HOROVOD", "HOROPLUG"])
def test_the_switch_turns_it_off(monkeypatch, prefix):
    off = {f"{prefix}_THREAD_SHARE": "0"}
    assert given_to(monkeypatch, (6, 0.0), **off, **{RANKS: "2"}) == off


def test_hardware_threads_of_a_core_count_once(tmp_path, monkeypatch):
    for number, siblings in enumerate(["0,2", "1", "0,2"]):
        (tmp_path / str(number)).write_text(siblings + "\n")
    monkeypatch.setattr(thread_share, "_TOPOLOGY", str(tmp_path / "{}"))
    assert capacity_of({0, 1, 2}, 0.0) == Capacity(2)
    assert capacity_of({0, 2}, 0.0) == Capacity(1)
    assert capacity_of({7, 8}, 1.5) == Capacity(2, 1.5)  # without a topology


def test_affinity_and_quota_of_this_process_count(tmp_path, monkeypatch):
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text(f"30 23 0:26 / {tmp_path} rw - cgroup2 none rw\n")
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    monkeypatch.setattr(cgroup, "PROCESS", tmp_path)
    monkeypatch.setattr(thread_share, "own_processors", lambda: frozenset({1001, 1002, 1003}))
    assert thread_share.own_capacity() == Capacity(3, 2.5)


# ---- who starts ranks ------------------------------------------------------------------------------------------------

SEEN_BY_FRAMEWORKS = program_text("tests/launcher/programs/thread_share_seen_by_frameworks.py")


def test_frameworks_start_as_many_threads_as_their_share():
    """Three ranks on few processors, which one framework each would fill alone."""
    for module in ("torch", "jax", "tensorflow"):
        pytest.importorskip(module)
    processors = sorted(os.sched_getaffinity(0))[:2]
    if len(processors) < 2:
        pytest.skip("the frameworks start one thread anyway")
    before = ["taskset", "-c", ",".join(map(str, processors))]
    done = launch("-np", 3, sys.executable, "-c", SEEN_BY_FRAMEWORKS, before=before)
    assert outputs(done) == {0: 1, 1: 1, 2: 1}


PRINT = "import json, os; print(json.dumps([os.environ.get(n) for n in {}]))".format(
    ("OMP_NUM_THREADS", "NPROC", RANKS)
)
LOCAL = [sys.executable, "-c", PRINT]


@pytest.mark.parametrize(
    ("flags", "env", "seen"),
    [
        (["-np", 2], {}, ["1", "1", None]),
        (["-np", 2], {"OMP_NUM_THREADS": "4"}, ["4", "1", None]),
        (["-np", 2, "--no-thread-share"], {}, [None, None, None]),
        (["-np", 2, "--thread-share"], {"HOROPLUG_THREAD_SHARE": "0"}, ["1", "1", None]),
        (["-np", 2, "--min-np", 2], {"NPROC": "3"}, ["1", "3", None]),
        (["-np", 2, "--max-np", 2], {"HOROVOD_THREAD_SHARE": "0"}, [None, None, None]),
    ],
    ids=["static", "own", "flag", "flag over variable", "elastic", "elastic, off"],
)
@pytest.mark.short
def test_horovodrun_gives_ranks_their_share(flags, env, seen):
    before = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    done = launch(*flags, *LOCAL, env=env, before=before)
    assert outputs(done) == {0: seen, 1: seen}
    assert done.stderr == ""


def test_invalid_switch_is_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "horoplug.runner", "-np", "2", "true"],
        env=ENV | {"HOROVOD_THREAD_SHARE": "some"},
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    line = "horovodrun: HOROVOD_THREAD_SHARE='some' is wrong: it must be 0 or 1\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_line_tells_of_the_share_once():
    """Rank 0 says so in its first init(), and not in later ones."""
    program = "import horoplug as hvd; hvd.init(); hvd.shutdown(); hvd.init()"
    done = launch("-np", 2, sys.executable, "-c", program)
    (line,) = done.stderr.splitlines()
    assert line.startswith("[0]<stderr>:")
    assert "OMP_NUM_THREADS=1" in line
    assert "HOROVOD_THREAD_SHARE=0 ends the sharing" in line


def test_workers_of_other_systems_get_their_share(monkeypatch):
    """As actors of Ray and tasks of Spark enter a job, and leave it for the next one."""
    monkeypatch.setattr(thread_share, "own_capacity", lambda: Capacity(8))
    env = {"TF_NUM_INTRAOP_THREADS": "2"}
    with WorkerJob(["a", "b", "a"]) as job:
        saved = enter(job.environment(2), env)
        assert env["OMP_NUM_THREADS"] == env["NPROC"] == "4"
        assert env["TF_NUM_INTRAOP_THREADS"] == "2"
        assert RANKS not in env
        enter(job.environment(1), env)  # the only rank of its host
        assert "OMP_NUM_THREADS" not in env
        leave(saved, env)
        assert env == {"TF_NUM_INTRAOP_THREADS": "2"}
    with WorkerJob(["a", "a"], settings={"THREAD_SHARE": "0"}) as job:
        enter(job.environment(0), env)
        assert "OMP_NUM_THREADS" not in env


# ---- init() ----------------------------------------------------------------------------------------------------------


def host(cores, quota=0.0):
    return types.SimpleNamespace(processors=frozenset(range(1000, 1000 + cores)), quota=quota)


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    before = module.get_num_threads()
    yield module
    module.set_num_threads(before)


def test_threads_follow_the_number_of_ranks_of_the_host(torch, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    os.environ.update({GIVEN: "1 OMP_NUM_THREADS NPROC", "OMP_NUM_THREADS": "1", "NPROC": "1"})
    torch.set_num_threads(1)
    compute_threads.settle(host(6), 2, other_launcher=False)
    assert torch.get_num_threads() == 3
    assert os.environ["OMP_NUM_THREADS"] == os.environ["NPROC"] == "3"
    compute_threads.settle(host(6), 3, other_launcher=False)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(5)  # the program's own choice
    compute_threads.settle(host(6), 1, other_launcher=False)
    assert torch.get_num_threads() == 5


def test_threads_beyond_the_share_are_told_under_other_launchers(torch, monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "4"})
    for name in ("tensorflow", "jax"):  # whatever other tests have imported
        monkeypatch.delitem(sys.modules, name, raising=False)
    torch.set_num_threads(4)
    line = compute_threads.settle(host(8, 5.0), 2, other_launcher=True)
    assert line.startswith("PyTorch has 4 compute threads in each of the 2 ranks of this host")
    assert "a CPU quota of 5" in line
    assert "OMP_NUM_THREADS=2" in line
    assert torch.get_num_threads() == 4
    assert compute_threads.settle(host(8), 2, other_launcher=True) == ""
    assert compute_threads.settle(host(8, 5.0), 2, other_launcher=False) == ""  # the user's choice
    monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
    os.environ["NPROC"] = "7"
    line = compute_threads.settle(host(8), 2, other_launcher=True)
    if not any(map(os.path.exists, compute_threads._GPUS)):
        assert line.startswith("JAX has 7 compute threads")
        assert "NPROC=4" in line
