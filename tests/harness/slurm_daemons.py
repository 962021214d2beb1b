"""Slurm daemons on this machine, with two nodes, for the tests of a module."""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.harness.limits import scaled
from tests.harness.support import environment, until

HOST = socket.gethostname().split(".")[0]
OTHER = "zz-other"
SSH = "#!/bin/sh\necho called >> {log}\necho 'ssh: there is no ssh' >&2\nexit 255\n"

# Without passwords or accounting, for one user. A requeued job waits until its credential has expired. The name of the
# first node, where rank 0 runs, is that of this machine.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=10
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
    """Free ports below Linux's ephemeral range, so that no other process takes one before Slurm does."""
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
    """A function that runs one of Slurm's programs and returns its exit code and output."""
    missing = [name for name in PROGRAMS if program(name) is None]
    if missing:
        pytest.skip(f"no {missing[0]}: apt-get install slurmctld slurmd slurm-client")
    place = tmp_path_factory.mktemp("slurm")
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    file = place / "slurm.conf"
    file.write_text(CONFIGURATION.format(host=HOST, folder=place, user=user, ports=free_ports(3)))
    variables = environment() | {
        "SLURM_CONF": str(file),
        "XDG_CONFIG_HOME": str(place),
        "PATH": f"{environment()['PATH']}:/usr/sbin",
    }

    def run(*command, folder=place, **more):
        done = subprocess.run(
            command,
            env=variables | more,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=scaled(60),
        )
        return done.returncode, done.stdout

    log = (place / "log").open("w+")
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
                daemon.wait(scaled(20))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(scaled(10))
        log.close()


@pytest.fixture
def allocated(slurm):
    """A function that runs a program in a job with two nodes and two tasks on each."""

    def run(*command, **variables):
        flags = ("-Q", "-N", "2", "-n", "4", "--ntasks-per-node=2")
        return slurm("salloc", *flags, *map(str, command), **variables)

    return run


@pytest.fixture
def without_ssh(tmp_path):
    """The PATH with an ssh that notes its call, and the file for that."""
    log = tmp_path / "ssh.log"
    (tmp_path / "ssh").write_text(SSH.format(log=log))
    (tmp_path / "ssh").chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, log


def batch(slurm, script: Path, *flags: str, limit: float = 60, **variables: str) -> str:
    """Submit a script, wait for its end, at most for ``limit`` seconds, and return its output."""
    output = script.with_suffix(".output")
    status, text = slurm(
        "sbatch", "--parsable", "-o", str(output), *flags, str(script), **variables
    )
    assert status == 0, text
    number = text.strip()

    def state():
        found = re.search(r"JobState=(\S+)", slurm("scontrol", "-o", "show", "job", number)[1])
        return found and found[1] not in ("PENDING", "RUNNING", "COMPLETING") and found[1]

    try:
        ended = until(state, timeout=limit)
    except AssertionError:
        slurm("scancel", number)
        raise AssertionError(f"not done after {limit:g} s:\n{output.read_text()}") from None
    assert ended == "COMPLETED", output.read_text()
    return output.read_text()
