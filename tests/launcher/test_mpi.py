"""``horovodrun --mpi`` and ``--jsrun``: the command lines that they build, and jobs under every installed MPI."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

import horoplug
from horoplug.runner.checks import UsageError
from horoplug.runner.hosts.hosts import Host
from horoplug.runner.mpi import mpirun
from horoplug.runner.start.allocation import lsf_hosts
from horoplug.runner.start.ssh import Ssh
from tests.harness.horovodrun_mpi import JOB
from tests.harness.horovodrun_mpi import place as place
from tests.harness.limits import scaled
from tests.harness.support import environment

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import this module
# What mpirun --version prints.
VERSIONS = {
    "Open MPI 5": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/",
    "Open MPI": "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/",
    "IBM Spectrum MPI": "mpirun (IBM Spectrum MPI) 10.3.1.02rtm0",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.19 Build 20260929 (id: 1821d9b)",
    "MPICH": "HYDRA build details:\n    Version:                                 5.0.2\n",
}
TWO = (Host("a", 2), Host("b", 2))


@pytest.mark.parametrize("name", VERSIONS)
def test_mpi_is_recognised_by_its_version(name):
    assert mpirun.recognise(VERSIONS[name]).name == name


def test_unknown_mpi_is_not_recognised():
    assert mpirun.recognise("slurm 23.1") is None


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("Open MPI 5", {}, "-np 4 -H localhost:4 --bind-to none --map-by slot --output tag"),
        ("Open MPI 5", {"allocated": True}, "-np 4 --bind-to none --map-by slot --output tag"),
        (
            "Open MPI 5",
            {"hosts": TWO, "root": True, "tcp": True, "interfaces": ["eth0", "eth1"], "forwarded": ["A", "B"]},
            "-np 4 -H a:2,b:2 --allow-run-as-root --bind-to none --map-by slot --mca pml ob1 --mca btl"
            " ^openib,uct,ofi,usnic --mca btl_tcp_if_include eth0,eth1 --output tag -x A -x B",
        ),
        (
            "Open MPI 5",
            {"hosts": TWO, "ssh": Ssh(("ssh", "-F", "x"), 22, "my key"), "timestamps": True, "output": Path("/o")},
            "-np 4 -H a:2,b:2 --bind-to none --map-by slot --mca plm_ssh_agent 'ssh -F x'"
            " --mca plm_ssh_args \"-p 22 -i 'my key'\" --output tag,timestamp,file=/o/rank",
        ),
        (
            "Open MPI",
            {
                "hosts": TWO, "ssh": Ssh(port=22), "ssh_options": ["-v"], "timestamps": True, "output": Path("/o"),
                "more": "-x",
            },
            "-np 4 -H a:2,b:2 --bind-to none --map-by slot --mca plm_rsh_args '-v -p 22' --tag-output"
            " --timestamp-output --output-filename /o -x",
        ),
        (
            "Open MPI",
            {"binding": "--bind-to core", "allocated": True},
            "-np 4 --bind-to core --tag-output",
        ),
        (
            "IBM Spectrum MPI",
            {"hosts": TWO, "tcp": True},
            "-tcp -np 4 -H a:2,b:2 -bind-to socket -map-by socket -rank-by core --tag-output",
        ),
        ("MPICH", {"forwarded": ["A"], "root": True}, "-prepend-rank -np 4 -bind-to none"),
        (
            "MPICH",
            {"hosts": (Host("a", 3), Host("b", 1)), "interfaces": ["eth0"], "more": "-print-all-exitcodes"},
            "-prepend-rank -np 4 -hosts a:3,b:1 -bind-to none -iface eth0 -print-all-exitcodes",
        ),
        (
            "Intel MPI",
            {"hosts": TWO, "output": Path("/o")},
            "-prepend-rank -np 4 -hosts a,b -ppn 2 -outfile-pattern /o/rank.%r/stdout"
            " -errfile-pattern /o/rank.%r/stderr",
        ),
        (
            "Intel MPI",
            {"hosts": (Host("a", 3), Host("b", 1))},
            "-prepend-rank -np 4 -hosts a:3,b:1",
        ),
    ],
)  # fmt: skip
@pytest.mark.short
def test_mpirun_command_line(name, options, line):
    made = mpirun.recognise(VERSIONS[name]).line(mpirun.Request(4, **options))
    assert made.arguments == shlex.split(line)


def test_mpirun_command_line_for_many_hosts():
    hosts = [Host(f"h{i}", 1) for i in range(mpirun.MANY_HOSTS)]
    line = shlex.join(
        mpirun.recognise(VERSIONS["Open MPI"]).line(mpirun.Request(64, hosts=hosts)).arguments
    )
    assert "--mca plm_rsh_no_tree_spawn true --mca plm_rsh_num_concurrent 64" in line


def test_options_that_are_passed_as_variables_or_left_out():
    line = mpirun.recognise(VERSIONS["MPICH"]).line(
        mpirun.Request(
            2,
            hosts=TWO,
            ssh=Ssh(("/my/ssh", "-v"), 22),
            tcp=True,
            timestamps=True,
            output=Path("/o"),
        )
    )
    assert line.variables == {
        "HYDRA_LAUNCHER_EXEC": "/my/ssh",
        "HYDRA_LAUNCHER_EXTRA_ARGS": "-v -p 22",
        "UCX_TLS": "tcp,sm,self",
        "FI_PROVIDER": "tcp",
    }
    assert line.folders == [Path("/o/rank.0"), Path("/o/rank.1")]
    assert line.remarks == ["this mpirun cannot print the time before every line; it is left out"]
    intel = mpirun.recognise(VERSIONS["Intel MPI"])
    assert intel.line(mpirun.Request(2, ssh=Ssh(("ssh", "-v")))).variables == {
        "I_MPI_PIN": "0",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-v",
    }


def test_jsrun_command_line():
    request = mpirun.Request(5, hosts=TWO, tcp=True, more="-disable_gpu_hooks", output=Path("/o"))
    assert mpirun.JSRUN.line(request).arguments == shlex.split(
        "--np 5 --nrs 2 --rs_per_host 1 --tasks_per_rs 3 --cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS --bind none"
        " --smpiargs '-tcp -disable_gpu_hooks' --stdio_mode individual --stdio_stdout=/o/rank.%t.stdout"
        " --stdio_stderr=/o/rank.%t.stderr"
    )
    with pytest.raises(UsageError, match="LSB_MCPU_HOSTS"):
        mpirun.JSRUN.line(mpirun.Request(5))


def test_hosts_of_an_lsf_allocation(tmp_path):
    assert lsf_hosts({"LSB_MCPU_HOSTS": "batch1 1 h1 42 h2 42"}) == [
        Host("h1", 42),
        Host("h2", 42),
    ]
    assert lsf_hosts({"LSB_MCPU_HOSTS": "h1 4"}) == [Host("h1", 4)]
    assert lsf_hosts({}) == []
    assert lsf_hosts({"PBS_NODEFILE": "/nonesuch"}) == []
    # A list that would be too long is omitted.
    (tmp_path / "hosts").write_text("batch1\n" + "h1\n" * 3 + "h2\n" * 3)
    assert lsf_hosts({"LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}) == [("h1", 3), ("h2", 3)]


def test_forwarded_names():
    plain = (
        "PATH PYTHONPATH HOROVOD_CYCLE_TIME NCCL_DEBUG HOME PWD SSH_AUTH_SOCK PMIX_RANK PMI_RANK"
    )
    env = dict.fromkeys(plain.split(" "), "")
    env |= dict.fromkeys(["OMPI_MCA_btl", "BASH_FUNC_module%%", "a-b", "_", "_x"], "")
    names = ["HOROVOD_CYCLE_TIME", "NCCL_DEBUG", "PATH", "PYTHONPATH", "_x"]
    assert mpirun.forwarded(env) == names
    assert mpirun.forwarded(env, ["HOME"]) == sorted([*names, "HOME"])


# ---- jobs ------------------------------------------------------------------------------------------------------------


def launch(*arguments, env, timeout=60):
    return subprocess.run(
        [sys.executable, "-m", "horoplug.runner", *map(str, arguments)],
        env=environment() | env,
        capture_output=True,
        text=True,
        timeout=scaled(timeout),
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.short("openmpi*")
def test_job_under_horovodrun_mpi(place):
    secret = "do-not-show-this-anywhere"
    stale = {
        "HOROVOD_SIZE": "7",
        "HOROPLUG_RANK": "3",
        "HOROVOD_SECRET_KEY": "stale",
        "MINE": secret,
    }
    flags = ["--mpi", "--verbose", "--cache-capacity", 77, "--tcp", "-np", 3]
    done = launch(*flags, sys.executable, "-c", JOB, "a b", "$HOME", env=place | stale)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"rank (\d) of 3: 6 (.*)", done.stdout)
    assert sorted(found) == [(str(rank), "['a b', '$HOME']") for rank in range(3)]
    assert "mpirun" in done.stderr.splitlines()[0]
    assert secret not in done.stderr


def test_output_files_of_an_mpirun_job(place, tmp_path):
    folder = tmp_path / "logs"
    done = launch(
        *("--mpi", "-np", 2, "--output-filename", folder, "-prefix-timestamp"),
        *("sh", "-c", "echo out; echo err >&2"),
        env=place,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = "".join(file.read_text() for file in folder.rglob("*") if file.is_file())
    assert written.count("out\n") == written.count("err\n") == 2


@pytest.mark.short("openmpi*", failure=True)
def test_exit_code_of_a_failing_mpirun_job(place):
    done = launch("--mpi", "-np", 2, "sh", "-c", "exit 7", env=place)
    assert done.returncode == 7


def test_run_function_with_mpirun(place):
    def work(factor):
        import horoplug as hvd

        hvd.init()
        print("text of a rank")
        return factor * hvd.rank(), [name for name in os.environ if "HOROPLUG_RUN" in name]

    def fail():
        import horoplug as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("of rank 1")
        hvd.barrier()

    options = {"num_proc": 2, "use_mpi": True, "env": environment() | place}
    assert horoplug.run(work, (3,), **options) == [(0, []), (3, [])]
    with pytest.raises(horoplug.RankError, match="rank 1: KeyError: 'of rank 1'"):
        horoplug.run(fail, **options)


def test_run_with_mpirun_takes_the_secret_from_a_file(place, tmp_path):
    """mpirun passes variables on in plain text, so none of them contains the secret of the exchange."""
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(os.urandom(32).hex())

    def variables():
        from pathlib import Path

        outer = [line.split("=")[0] for line in Path("/proc/self/environ").read_text().split("\0")]
        return sorted(name for name in outer if "SECRET" in name or "_RUN_" in name)

    env = environment() | place | {"HOROPLUG_SECRET_FILE": str(file)}
    found = horoplug.run(variables, num_proc=2, use_mpi=True, env=env)
    names = [
        "HOROPLUG_SECRET_FILE",
        "_HOROPLUG_RUN_ADDRESS",
        "_HOROPLUG_RUN_PORT",
        "_HOROPLUG_RUN_SALT",
    ]
    assert found == [names] * 2
    file.chmod(0o644)
    with pytest.raises(ValueError, match="can be read or changed by other users"):
        horoplug.run(variables, num_proc=2, use_mpi=True, env=env)


# ---- failures to start -----------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    """A function that puts a program into a folder. PATH consists of this folder and Python's."""

    def put(name, script):
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    put.env = {"PATH": str(tmp_path)}
    put("train", "")
    return put


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mpi", "there is no mpirun on PATH; leave out --mpi to start the ranks without MPI"),
        ("--jsrun", "there is no jsrun on PATH"),
        ("--mpi -H a:1", "-np 2 is more than a:1 has: 1 slot"),
    ],
)
def test_missing_mpirun_is_an_error(path, flags, message):
    if "-H" in flags:
        path("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    done = launch(*flags.split(), "-np", 2, "train", env=path.env)
    assert done.returncode == 2
    assert re.fullmatch(r"horovodrun: [^\n]+\n", done.stderr)
    assert message in done.stderr


def test_ssh_options_for_batch_mode_and_keepalive(path):
    path("mpirun", 'case $1 in --version) echo "mpirun (Open MPI) 5.0.1";; *) echo "$@";; esac')
    done = launch("--mpi", "-np", 2, "-H", "a:2", "train", env=path.env)
    wanted = "-o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ServerAliveInterval=5"
    assert f"--mca plm_ssh_args {wanted} " in done.stdout, done
    done = launch("--mpi", "--ssh-strict", "-np", 2, "-H", "a:2", "train", env=path.env)
    assert f"{wanted.replace('accept-new', 'yes')} " in done.stdout, done


def test_unknown_mpirun_is_an_error(path):
    path("mpirun", "echo; echo My MPI 1.0")
    done = launch("--mpi", "-np", 2, "train", env=path.env)
    assert done.returncode == 2
    assert re.fullmatch(
        r"horovodrun: \S+/mpirun belongs to no MPI [^\n]+'My MPI 1.0'[^\n]+\n", done.stderr
    )


def test_badly_quoted_mpi_arguments_are_refused(path):
    path("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    done = launch("--mpi", "-np", 2, "--mpi-args", "'one", "train", env=path.env)
    assert done.stderr == "horovodrun: --mpi-args and --binding-args: no closing quotation\n"


def test_job_under_jsrun(path):
    path("jsrun", 'echo "$@"; echo $LSB_JOBID')
    env = path.env | {"LSB_JOBID": "12", "LSB_MCPU_HOSTS": "batch 1 h1 4 h2 4"}
    done = launch("--jsrun", "-np", 8, "train", env=env)
    line, job = done.stdout.splitlines()
    assert line.startswith("--np 8 --nrs 2 --rs_per_host 1 --tasks_per_rs 4 ")
    assert line.endswith(" --bind none train")
    assert job == "12"
    # By default, one process for each slot of the hosts on which jsrun starts ranks.
    assert launch("--jsrun", "train", env=env).stdout.splitlines()[0] == line
    done = launch("--jsrun", "-np", 8, "train", env=env | {"LSB_MCPU_HOSTS": "h1 x"})
    assert re.fullmatch("horovodrun: LSF has set LSB_MCPU_HOSTS=h1 x, but: [^\n]+\n", done.stderr)
    done = launch("--jsrun", "-np", 8, "-H", "h1:8", "train", env=env)
    assert done.stderr == "horovodrun: --jsrun takes the hosts of the LSF job; leave out -H\n"


def test_mpi_arguments_without_mpi_are_refused():
    done = launch("-np", 1, "--mpi-args", "-x y", "true", env={})
    assert done.returncode == 0
    assert done.stderr == "horovodrun: --mpi-args has no effect without --mpi or --jsrun\n"
