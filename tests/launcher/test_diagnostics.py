"""``horovodrun --check-build -v``, and the defaults that horovodrun takes from a scheduler's allocation."""

import subprocess
import sys

import pytest

from horoplug.runner.command.arguments import parse
from horoplug.runner.diagnosis import diagnostics
from horoplug.runner.launch import as_scheduled
from tests.harness.limits import scaled
from tests.harness.mpi_jobs import place
from tests.harness.starters import distributed, srun
from tests.harness.support import environment

__all__ = ["place"]  # a fixture

RUNNER = [sys.executable, "-m", "horoplug.runner"]


def horovodrun(*flags, before=(), **variables):
    done = subprocess.run(
        [*before, *RUNNER, *flags],
        env=environment() | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("flags", ["--check-build -v", "-v -cb", "--check-build --verbose"])
def test_verbose_check_build_adds_launcher_scheduler_and_mpi(flags):
    short = horovodrun("--check-build")[1]
    status, text, _ = horovodrun(*flags.split())
    assert status == 0
    assert text.startswith(short.rstrip("\n"))
    added = text[len(short) :]
    for title in ("Launcher:", "Scheduler:", "MPI:"):
        assert title not in short
        assert f"\n{title}\n    " in added
    assert "rank 0 of 1" in added


def test_v_flag_alone_prints_the_version():
    assert len(horovodrun("-v")[1].splitlines()) == 1


def test_verbose_check_build_shows_the_recognised_launcher(tmp_path):
    variables = srun(4, nodes=2)[1] | {"XDG_CONFIG_HOME": str(tmp_path)}
    text = horovodrun("--check-build", "-v", **variables)[1]
    for part in (
        "Slurm's srun: SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_ID=0",
        "rank 1 of 4",
        "find rank 0 on 127.0.0.1, at one of 8 secret ports, with a secret derived from ",
        f"{tmp_path}/horoplug/key",
        "SLURM_JOB_NODELIST=127.0.0.[1-2]",
        "127.0.0.1:1, 127.0.0.2:1",
    ):
        assert part in text
    assert not list(tmp_path.iterdir()), "it is not to make a key"


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"HOROPLUG_GLOO_RENDEZVOUS_PORT": "12345"},
            "find rank 0 on 127.0.0.1, at port 12345, with",
        ),
        (
            {"HOROPLUG_GLOO_RENDEZVOUS_ADDR": "10.1.2.3"},
            "find rank 0 on 10.1.2.3, at one of 8 secret ports, with",
        ),
        ({"_HOROVOD_SECRET_KEY": 32 * "5a"}, "with a secret derived from HOROPLUG_SECRET_KEY"),
        ({"HOROVOD_CONTROLLER": "mpi"}, "bootstrap over MPI"),
        ({"HOROVOD_SECRET_KEY": "?"}, "but there is an error: HOROVOD_SECRET_KEY="),
    ],
)
def test_user_settings_override_the_launcher_environment(monkeypatch, variables, line):
    """The report shows the settings that a program would use."""
    monkeypatch.setattr(diagnostics, "_mpi", list)
    assert line in diagnostics.describe(srun(4, nodes=2)[1] | variables)


def test_several_launchers_and_invalid_variables():
    both = srun(4)[0] | distributed(2)[1]
    text = horovodrun("--check-build", "-v", **both)[1]
    assert "rank 0 of 4" in text
    assert "takes precedence: a launcher for torch.distributed: RANK=1 WORLD_SIZE=2" in text
    text = horovodrun("--check-build", "-v", **both, HOROVOD_SIZE="3", HOROVOD_RANK="2")[1]
    assert (
        "horovodrun, or a launcher that sets its variables: HOROVOD_RANK=2 HOROVOD_SIZE=3" in text
    )
    assert "takes precedence: Slurm's srun" in text
    text = horovodrun("--check-build", "-v", SLURM_JOB_ID="1", SLURM_PROCID="0")[1]
    assert "srun starts ranks, not the batch script" in text
    text = horovodrun("--check-build", "-v", **distributed(2)[0] | {"RANK": "2"})[1]
    assert "that is an error: a launcher for torch.distributed has set RANK=2" in text


def test_verbose_check_build_under_mpirun(place):
    pytest.importorskip("mpi4py")
    before = (str(place.mpirun), "-np", "2")
    status, text, errors = horovodrun("-cb", "-v", before=before, **place.environment())
    assert status == 0, errors
    assert text.count("the ranks bootstrap over MPI") == 2
    assert text.count(f"with {place.library.resolve()}: ") == 2
    assert text.count("asks for multiple, the library grants multiple") == 2
    assert (
        text.count("GPUs: the library says that it is not CUDA-aware: it moves no GPU tensors") == 2
    )


SUM = """
import sys
import numpy as np
import horoplug as hvd
hvd.init()
sys.stdout.write(f"{hvd.allreduce(np.ones(1), op=hvd.Sum)[0]:g} ranks\\n")
"""


def test_rank_count_defaults_to_the_allocation(tmp_path):
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "3"}
    command = (sys.executable, str(script))
    status, text, errors = horovodrun(*command, **slurm)
    assert status == 0, errors
    assert text.count("3 ranks") == 3
    # -np takes precedence.
    assert horovodrun("-np", "2", *command, **slurm)[1].count("2 ranks") == 2
    status, _, errors = horovodrun(*command, SLURM_JOB_NODELIST="node[1")
    assert status == 2
    assert "SLURM_JOB_NODELIST=node[1" in errors
    assert len(errors.splitlines()) == 1
    status, _, errors = horovodrun(*command)
    assert status == 2
    assert "-np" in errors


TWO_NODES = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
ONE_NODE = {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ("", TWO_NODES, (8, "node1:4,node2:4")),
        ("-np 6", TWO_NODES, (6, "node1:4,node2:4")),
        ("-np 6 -H other:6", TWO_NODES, (6, "other:6")),
        ("-np 6 -hostfile file", TWO_NODES, (6, None)),
        ("--mpi", TWO_NODES, (8, None)),  # mpirun takes the hosts from Slurm
        ("", ONE_NODE, (2, "localhost:2")),
        ("-np 6", ONE_NODE, (6, None)),  # any number
        ("-np 6", {}, (6, None)),
        ("", {"SM_HOSTS": '["fe80::1", "b"]'}, (2, "[fe80::1]:1,b:1")),
    ],
)
def test_hosts_default_to_the_allocation(monkeypatch, flags, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = as_scheduled(parse([*flags.split(), "python"]))
    assert (options.num_proc, options.hosts) == expected
