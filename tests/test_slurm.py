"""Jobs of a real Slurm, if it is installed: its three daemons run on this machine, with two nodes, for these tests."""

import re
import shutil
import socket
import subprocess
import sys

import pytest
from support import ROOT, environment, until
from test_launched_jobs import JOB

sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import mpi

HOST = socket.gethostname().split(".")[0]

# Without passwords or accounting, for one user. The first node, where rank 0 is, has a name that leads to this machine.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16
NodeName=zz-other NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo")


def program(name):
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def free_ports(count):
    """Below those that Linux gives away, so that nobody takes one until Slurm does."""
    found = []
    for port in range(10000 + 7 * (id(found) % 1000), 32000):
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no port is free")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A function that runs one of Slurm's programs, and returns its exit code and output."""
    missing = [name for name in PROGRAMS if program(name) is None]
    if missing:
        pytest.skip(f"no {missing[0]}: apt-get install slurmctld slurmd slurm-client")
    folder = tmp_path_factory.mktemp("slurm")
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    file = folder / "slurm.conf"
    file.write_text(CONFIGURATION.format(host=HOST, folder=folder, user=user, ports=free_ports(3)))
    variables = environment() | {
        "SLURM_CONF": str(file),
        "XDG_CONFIG_HOME": str(folder),
        "PATH": f"{environment()['PATH']}:/usr/sbin",
    }

    def run(*command, timeout=60, **more):
        done = subprocess.run(
            command,
            env=variables | more,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return done.returncode, done.stdout

    log = (folder / "log").open("w+")
    daemons = [
        subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        for command in (
            [program("slurmctld"), "-D"],
            [program("slurmd"), "-D", "-N", HOST],
            [program("slurmd"), "-D", "-N", "zz-other"],
        )
    ]
    try:
        until(lambda: run("sinfo", "-h", "-o", "%T %D") == (0, "idle 2\n"), timeout=30)
        yield run
    except AssertionError:
        log.seek(0)
        print(log.read())
        raise
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
        log.close()


def done(output):
    return sorted(re.findall(r"rank (\d of \d) is done", output))


def test_srun(slurm):
    status, output = slurm("srun", "-n", "2", sys.executable, "-c", JOB)
    assert status == 0, output
    assert done(output) == ["0 of 2", "1 of 2"]


def test_two_nodes(slurm):
    status, output = slurm("srun", "-N", "2", "-n", "4", sys.executable, "-c", JOB)
    assert status == 0, output
    assert done(output) == [f"{rank} of 4" for rank in range(4)]


def batch(slurm, folder, commands, slots, **variables):
    """Submit a script, wait for its end, and return its output."""
    script, output, status = folder / "script.sh", folder / "output", folder / "status"
    script.write_text(
        f"#!/bin/bash\nset -e\ntrap 'echo $? > {status}.part; mv {status}.part {status}' EXIT\n{commands}\n"
    )
    flags = ("-w", HOST, "-n", str(slots), "-o", str(output))
    code, text = slurm("sbatch", *flags, str(script), **variables)
    assert code == 0, text
    until(status.exists, timeout=60)
    text = output.read_text()
    assert status.read_text() == "0\n", text
    return text


def test_a_batch_script(slurm, tmp_path):
    """The script itself is no rank; it can start several jobs, one after the other and side by side."""
    job = tmp_path / "job.py"
    job.write_text(JOB)
    python = f"{sys.executable} {job}"
    commands = f"""
{python}
srun {python}
srun -n 1 --exact {python} & srun -n 2 --exact {python} & wait %1; wait %2
{sys.executable} -m horoplug.runner {python}
"""
    expected = ["0 of 1"] * 2 + ["0 of 2", "1 of 2"] + 2 * ["0 of 3", "1 of 3", "2 of 3"]
    assert done(batch(slurm, tmp_path, commands, 3)) == sorted(expected)


COMMUNICATOR = """
import sys
from mpi4py import MPI
import horoplug as hvd
world = MPI.COMM_WORLD
hvd.init(comm=world)
assert (hvd.rank(), hvd.size()) == (world.rank, world.size) == (hvd.rank(), 2)
hvd.shutdown()
hvd.init(comm=world.Split(world.rank))
assert hvd.size() == 1
sys.stdout.write(f"rank {world.rank} of 2 is done\\n")
"""


def test_with_pmi(slurm):
    """With an MPI that Slurm has told who is who, communicators may be given to init()."""
    pytest.importorskip("mpi4py")
    found = mpi.find("mpich")
    if found is None:
        pytest.skip("mpich is not installed: make mpi")
    command = ("srun", "--mpi=pmi2", "-n", "2", sys.executable, "-c")
    status, output = slurm(*command, COMMUNICATOR, **found.environment())
    assert status == 0, output
    assert done(output) == ["0 of 2", "1 of 2"]
    # Without it, every process is a world of its own for MPI.
    status, output = slurm("srun", *command[2:], COMMUNICATOR, **found.environment())
    assert status != 0
    assert "MPI knows of 1 of the 2 processes that Slurm's srun has started" in output


@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi"])
def test_mpirun_in_a_batch_script(slurm, tmp_path, name):
    pytest.importorskip("mpi4py")
    found = mpi.find(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make mpi")
    job = tmp_path / "job.py"
    job.write_text(JOB)
    command = f"{found.mpirun} -np 2 {sys.executable} {job}"
    output = batch(slurm, tmp_path, command, 2, **found.environment())
    assert done(output) == ["0 of 2", "1 of 2"]
