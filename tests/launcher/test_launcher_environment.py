"""Launchers are recognised by the variables of a process; host lists and allocations of schedulers are parsed.

test_launcher_environment_jobs.py starts jobs with these variables."""

import json
import os
import random
import subprocess

import pytest

from horoplug.rendezvous.bootstrap import slurm, slurm_task
from horoplug.rendezvous.bootstrap.job_key import job_secret
from horoplug.rendezvous.bootstrap.launcher_environment import LAUNCHERS, inherited, recognise
from horoplug.rendezvous.bootstrap.over_tcp import ports
from horoplug.runner.checks import UsageError
from horoplug.runner.hosts.hosts import Host
from horoplug.runner.start.allocation import allocation, why_over
from tests.harness.starters import (
    STARTERS,
    distributed,
    indexed_job,
    jsrun,
    sagemaker,
    srun,
    trainer,
    vertex,
)
from tests.harness.support import seed

NUMBERS = [each for each in LAUNCHERS if each.name not in ("SageMaker", "Vertex AI")]
MORE = {"MASTER_ADDR": "localhost", "SLURM_STEP_NODELIST": "localhost", "LSB_HOSTS": "localhost"}

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "run", "MASTER_ADDR": "host"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "2"}
VERTEX = {"CLOUD_ML_JOB_ID": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}


def complaint(function, *arguments):
    """The text of the error that a function raises. Checks that it is one line."""
    with pytest.raises((ValueError, UsageError), match=r"\A[^\n]+\Z") as caught:
        function(*arguments)
    return str(caught.value)


def variables(launcher, rank, size):
    return MORE | dict.fromkeys(launcher.also, "1") | {launcher.rank: rank, launcher.size: size}


@pytest.mark.parametrize("launcher", NUMBERS, ids=lambda launcher: launcher.name)
@pytest.mark.short
def test_launchers_are_recognised_by_their_variables(launcher):
    found = recognise(variables(launcher, "1", "3"))
    assert found is not None
    assert (found.launcher, found.rank, found.size) == (launcher, 1, 3)
    # Horovod's own variables take precedence, and a job of one process needs no launcher.
    assert recognise(variables(launcher, "1", "3") | {"HOROVOD_SIZE": "2"}) is None
    assert recognise(variables(launcher, "1", "3") | {"HOROPLUG_SIZE": "2"}) is None
    assert recognise(variables(launcher, "0", "1")) is None
    assert recognise(variables(launcher, "", "3")) is None


@pytest.mark.parametrize("launcher", NUMBERS, ids=lambda launcher: launcher.name)
@pytest.mark.parametrize(
    ("rank", "size"), [("3", "3"), ("-1", "3"), ("one", "3"), ("0", "0"), ("0", "?")]
)
def test_invalid_ranks_and_sizes_are_refused(launcher, rank, size):
    text = complaint(recognise, variables(launcher, rank, size))
    for part in (launcher.name, f"{launcher.rank}={rank}", f"{launcher.size}={size}", "horovodrun"):
        assert part in text


@pytest.mark.parametrize("starter", STARTERS.values())
@pytest.mark.short
def test_every_starter_gives_consistent_ranks(starter):
    found = [recognise(each) for each in starter(3)]
    assert [(each.rank, each.size) for each in found] == [(0, 3), (1, 3), (2, 3)]
    assert len({each.launcher.name for each in found}) == 1
    assert len({each.bootstrap_address for each in found}) == 1, (
        "the ranks would not find each other"
    )


def address(variables):
    return recognise(variables).bootstrap_address


def test_bootstrap_address_of_each_launcher(tmp_path):
    assert address(srun(4, nodes=2)[1]).hosts == ("127.0.0.1",)
    assert not address(srun(4, nodes=2)[1]).on_one_host
    assert address(srun(4)[1]).on_one_host
    assert address(jsrun(2)[0]).hosts == ("batch.invalid", "localhost")
    assert address(jsrun(2)[0] | {"JSM_NAMESPACE_LOCAL_SIZE": "2"}).on_one_host
    (tmp_path / "hosts").write_text("batch\nh1\nh1\nh2\nh2\n")
    large = {"LSB_MCPU_HOSTS": "", "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}
    assert address(jsrun(2)[0] | large).hosts == ("batch", "h1")
    assert address(distributed(2)[1]).hosts == ("localhost",)
    assert address(trainer(2)[1]).hosts == ("localhost",)
    assert address(indexed_job(2)[1]).hosts == ("localhost",)
    assert address(sagemaker(2)[1]).hosts == ("127.0.0.1",)
    assert address(vertex(2)[1]).hosts == ("127.0.0.1",)
    assert address(TORCHRUN).hosts == ("host",)
    assert not address(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}).on_one_host
    assert address(TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}).on_one_host
    assert address(OPEN_MPI) is None
    assert address(HYDRA) is None
    many = {"SM_HOSTS": json.dumps([f"algo-{n}" for n in (10, 9, 2, 1)])}
    assert recognise(many | {"SM_CURRENT_HOST": "algo-10"}).rank == 3


def test_restart_is_a_different_job():
    jobs = [
        address(each).job
        for each in (
            srun(2)[0],
            srun(2, step=1)[0],
            srun(2, SLURM_RESTART_COUNT="1")[0],
            srun(2, SLURM_JOB_ID="1")[0],
            TORCHRUN,
            TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"},
            TORCHRUN | {"MASTER_PORT": "29501"},
        )
    ]
    assert len(set(jobs)) == len(jobs)
    # The ports differ, too, and are never ephemeral ports of Linux.
    numbers = [ports(job_secret(bytes(32), job)) for job in jobs]
    assert len(set(map(tuple, numbers))) == len(jobs)
    assert all(1024 < port < 32768 for each in numbers for port in each)


def test_ports_do_not_follow_from_the_name_of_a_job():
    """The name of a job is public. Without the user's key, nobody knows the ports of rank 0 beforehand."""
    job = address(srun(2)[0]).job
    assert not set(ports(job_secret(bytes(32), job))) & set(
        ports(job_secret(bytes(31) + b"1", job))
    )


def name_of(*parts):
    """The recognised launcher if the variables of several are set."""
    merged = {}
    for part in parts:
        merged |= part
    found = recognise(merged)
    return found.launcher.name if found else None


def test_innermost_launcher_wins():
    step = srun(4, nodes=4)[0]
    assert name_of(step, OPEN_MPI) == "Open MPI's mpirun"  # Open MPI's daemons are a step of srun
    assert name_of(step, HYDRA) == "mpirun of MPICH or Intel MPI"
    assert name_of(step, {"PMI_RANK": "0", "PMI_SIZE": "4"}) == "Slurm's srun"  # --mpi=pmi2
    assert name_of(step, {"PMIX_RANK": "0"}) == "Slurm's srun"
    assert name_of(step, TORCHRUN) == "torchrun"
    assert name_of(OPEN_MPI, TORCHRUN) == "torchrun"
    assert name_of(step, distributed(4)[0]) == "Slurm's srun"  # a script that exports MASTER_ADDR
    assert name_of(sagemaker(4)[0], OPEN_MPI) == "Open MPI's mpirun"
    assert name_of(trainer(2)[0], TORCHRUN) == "torchrun"
    # The pods of Kubeflow Trainer and of other operators have an index, too.
    assert name_of(trainer(2)[0], indexed_job(2)[1]) == "Kubeflow Trainer"
    assert name_of(distributed(2)[0], indexed_job(4)[1]).startswith("a launcher for torch")
    assert name_of(indexed_job(2)[0], OPEN_MPI) == "Open MPI's mpirun"
    assert name_of(jsrun(2)[0]) == "LSF's jsrun"  # jsrun sets Open MPI's variables, too
    # A job of one process inside a larger job is a job of one process.
    assert (
        name_of(step, OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) is None
    )


def test_processes_outside_a_job_are_not_ranks():
    batch_script = {key: value for key, value in srun(2)[0].items() if "STEP" not in key}
    assert recognise(batch_script) is None
    assert (
        recognise({"RANK": "1", "WORLD_SIZE": "2"}) is None
    )  # these variables do not identify a launcher
    assert recognise({"JOB_COMPLETION_INDEX": "1"}) is None  # a pod that works alone
    assert recognise({"CLUSTER_SPEC": '{"worker": ["a:1", "b:1"]}'}) is None  # of TonY
    assert recognise({}) is None


def test_variables_of_a_task_describe_the_processes_that_it_has_started(monkeypatch):
    """Not those of a tmux server that has outlived the task, for example. Without a pid they are believed."""
    monkeypatch.setattr(slurm_task, "_sees_all_processes", lambda: True)
    with subprocess.Popen(["true"]) as ended:
        pass
    step = srun(2)[1]
    for task in (os.getpid(), os.getppid(), "", "?"):
        assert recognise(step | {"SLURM_TASK_PID": str(task)}).rank == 1
        assert inherited(step | {"SLURM_TASK_PID": str(task)}) == ""
    with subprocess.Popen(["sleep", "60"]) as other:
        for task in (ended.pid, other.pid):
            stale = step | {"SLURM_TASK_PID": str(task)}
            for variables in (stale, stale | {"PMI_RANK": "1", "PMI_SIZE": "2"}):
                assert recognise(variables) is None
                assert "SLURM_STEP_NUM_TASKS=2, but that task" in inherited(variables)
            assert recognise(stale | TORCHRUN).rank == 3
            assert inherited(stale | {"HOROVOD_SIZE": "2"}) == ""
        other.kill()
    # In a container, the task may be a process that is not visible.
    monkeypatch.setattr(slurm_task, "_sees_all_processes", lambda: False)
    assert recognise(step | {"SLURM_TASK_PID": str(ended.pid)}).rank == 1


@pytest.mark.parametrize(
    ("output", "error", "over"),
    [
        ("RUNNING", "", ""),
        ("RUNNING\nCOMPLETED", "", ""),
        ("SUSPENDED", "", ""),
        ("COMPLETED", "", "Slurm's job 12 is over (COMPLETED)"),
        (
            "",
            "slurm_load_jobs error: Invalid job id specified",
            "Slurm does not know job 12 any more",
        ),
        ("", "slurm_load_jobs error: Unable to contact slurm controller", ""),
        ("", "", ""),
    ],
)
def test_scheduler_says_whether_a_job_is_over(tmp_path, output, error, over):
    (tmp_path / "squeue").write_text(
        f"#!/bin/sh\ncase $* in *--jobs=12\\ *) printf '{output}\\n'; printf '{error}\\n' >&2;; esac\n"
    )
    (tmp_path / "squeue").chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_ID": "12", "PATH": str(tmp_path)}
    assert why_over(job) == over
    assert why_over(job | {"PATH": "/nonesuch"}) == ""
    assert why_over({"LSB_MCPU_HOSTS": "a 2", "PATH": str(tmp_path)}) == ""


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        (srun(2)[0] | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST"),
        (srun(2)[0] | {"SLURM_STEP_NODELIST": "node[1-"}, "node[1-"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR"),
        (jsrun(2)[0] | {"LSB_MCPU_HOSTS": ""}, "LSB_MCPU_HOSTS"),
        (
            jsrun(2)[0] | {"LSB_MCPU_HOSTS": "", "LSB_DJOB_HOSTFILE": "/nonesuch"},
            "LSB_DJOB_HOSTFILE=/nonesuch: No such file",
        ),
        (
            indexed_job(2)[0] | {"JOB_COMPLETION_INDEX": "2"},
            "JOB_COMPLETION_INDEX=2 and WORLD_SIZE=2",
        ),
        (sagemaker(2)[0] | {"SM_CURRENT_HOST": "nobody"}, "SM_CURRENT_HOST=nobody"),
        (sagemaker(2)[0] | {"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS=algo-1,algo-2"),
        (sagemaker(2)[0] | {"SM_HOSTS": '{"a": 1}'}, "SM_HOSTS"),
        (VERTEX | {"CLUSTER_SPEC": "{}"}, "Vertex AI has set CLUSTER_SPEC={}, which"),
        (VERTEX | {"CLUSTER_SPEC": "[1]"}, "CLUSTER_SPEC=[1]"),
        (VERTEX | {"CLUSTER_SPEC": "{"}, "CLUSTER_SPEC={"),
        (
            VERTEX | {"CLUSTER_SPEC": '{"cluster": {"a": ["h:1"]}, "task": {"type": "b"}}'},
            "CLUSTER_SPEC=",
        ),
        (
            VERTEX | {"CLUSTER_SPEC": '{"cluster": {"a": 1}, "task": {"type": "a"}}'},
            "CLUSTER_SPEC=",
        ),
    ],
)
@pytest.mark.short(failure=True)
def test_missing_variables_are_named(variables, missing):
    assert missing in complaint(recognise, variables)


# ---- Slurm's lists ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", "login1"),
        ("a,b", "a b"),
        ("node[1-3]", "node1 node2 node3"),
        ("node[001-003,7]-ib", "node001-ib node002-ib node003-ib node7-ib"),
        ("node[9-11],gpu-[08,10]", "node9 node10 node11 gpu-08 gpu-10"),
        ("rack[1-2]n[1-2]", "rack1n1 rack1n2 rack2n1 rack2n2"),
        ("[1-2].example.org", "1.example.org 2.example.org"),
    ],
)
def test_slurm_host_lists_are_expanded(text, hosts):
    assert slurm.hosts(text) == hosts.split()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,,b",
        "a[",
        "a]",
        "a[]",
        "a[1-]",
        "a[-1]",
        "a[2-1]",
        "a[x]",
        "a[1[2]]",
        "a[1-99999999999]",
        ",",
    ],
)
def test_invalid_slurm_host_lists_are_refused(text):
    complaint(slurm.hosts, text)


def test_any_text_is_a_host_list_or_an_error():
    generator = random.Random(seed())
    for _ in range(2000):
        text = "".join(generator.choices("ab01-,[]", k=generator.randrange(16)))
        try:
            assert all(slurm.hosts(text))
        except ValueError:
            continue


def test_oversized_host_lists_are_refused():
    with pytest.raises(ValueError, match="more than"):
        slurm.hosts("a[1-1000][1-1000][1-1000]")


def test_task_counts_are_expanded():
    assert slurm.counts("2(x3),1") == [2, 2, 2, 1]
    assert slurm.counts("40") == [40]
    for text in ("", "2(x", "x3", "1,,2", "-1", "1(x99999999999)"):
        complaint(slurm.counts, text)


# ---- allocations of schedulers ---------------------------------------------------------------------------------------


def test_hosts_and_slots_of_scheduler_allocations(tmp_path):
    def file(text):
        path = tmp_path / "hosts"
        path.write_text(text)
        return str(path)

    assert allocation({}) is None
    slurm_job = {"SLURM_JOB_NODELIST": "node[1-3],big", "SLURM_TASKS_PER_NODE": "2(x3),8"}
    expected = [Host("node1", 2), Host("node2", 2), Host("node3", 2), Host("big", 8)]
    assert allocation(slurm_job) == expected
    assert allocation({"SLURM_JOB_NODELIST": "a"}) == [Host("a", 1)]
    two = [Host("a", 2), Host("b", 1)]
    assert allocation({"LSB_DJOB_HOSTFILE": file("a\na\nb\n")}) == two
    assert allocation({"LSB_MCPU_HOSTS": "a 2 b 1"}) == two
    assert allocation({"PBS_NODEFILE": file("a\nb\na\n")}) == two
    assert allocation({"PE_HOSTFILE": file("a 2 all.q@a UNDEFINED\nb 1 all.q@b 0,0:0,1\n")}) == two
    operator = {"OMPI_MCA_orte_default_hostfile": file("a slots=2\nb slots=1\n")}
    assert allocation(operator) == two
    assert allocation(operator | slurm_job) == two
    assert allocation({"I_MPI_HYDRA_HOST_FILE": file("a:2\nb:1\n")}) == two
    assert allocation({"HYDRA_HOST_FILE": file("# generated\na:2\n\nb\n")}) == two
    assert allocation({"SM_HOSTS": '["a", "b"]'}) == [Host("a", 1), Host("b", 1)]
    assert allocation({"SM_HOSTS": '["a"]', "SM_NUM_GPUS": "8"}) == [Host("a", 8)]


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_NODELIST": "a[1"},
        {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_TASKS_PER_NODE": "1"},
        {"PBS_NODEFILE": "/nowhere/at/all"},
        {"PBS_NODEFILE": os.devnull},
        {"LSB_MCPU_HOSTS": "a 2 b"},
        {"LSB_MCPU_HOSTS": "a two"},
        {"SM_HOSTS": "algo-1"},
        {"SM_HOSTS": "[]"},
    ],
)
def test_invalid_allocations_are_refused(variables):
    text = complaint(allocation, variables)
    assert next(iter(variables)) in text
    assert "-H" in text
