"""Jobs of real processes started as by Slurm, LSF, SageMaker and torch.distributed launchers (harness/starters.py)."""

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness import ROOT, program_text
from tests.harness.mpi_jobs import find
from tests.harness.starters import JOB, STARTERS, distributed, run, srun
from tests.harness.support import environment, until

sys.path.insert(0, str(ROOT / "benchmarks"))

from network import Network

from horoplug.rendezvous.bootstrap.job_key import job_secret, user_key
from horoplug.rendezvous.bootstrap.launcher_environment import recognise
from horoplug.rendezvous.bootstrap.over_tcp import ports
from horoplug.rendezvous.store.server import StoreServer
from tests.harness.limits import scaled

REFUSED = """
import sys
import horoplug as hvd
try:
    hvd.init()
except (ValueError, RuntimeError) as error:
    sys.stdout.write(f"refused: {error}\\n")
"""

KEY = os.urandom(32)


@pytest.fixture
def home(tmp_path):
    """The folder with the user's key, and the variables that lead a job's processes to it."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOROPLUG_START_TIMEOUT": "25"}


def every(environments, *more):
    for each in more:
        environments = [variables | each for variables in environments]
    return environments


def check(results):
    size = len(results)
    for rank, (status, output) in enumerate(results):
        assert status == 0, output
        assert f"rank {rank} of {size} is done" in output


def refusal(result):
    """The line that a process of REFUSED printed. Checks that it printed nothing else."""
    found = re.fullmatch(r"refused: (.*)\n", result[1])
    assert found, result[1]
    return found[1]


@pytest.mark.parametrize("starter", STARTERS.values())
@pytest.mark.short
def test_job_started_by_each_launcher(starter, home):
    check(run(every(starter(2), home), JOB))


def test_job_on_hosts_without_shared_memory(home):
    environments = every(srun(4, nodes=2), home)
    script = """
import sys
import numpy as np
import horoplug as hvd
hvd.init()
assert (hvd.local_size(), hvd.cross_size()) == (2, 2)
assert (hvd.mpi_enabled(), hvd.gloo_enabled()) == (False, True)
assert hvd.allreduce(np.ones(1000), op=hvd.Sum).tolist() == [4] * 1000
sys.stdout.write(f"rank {hvd.rank()} of 4 is done\\n")
"""
    hosts = [{"HOROVOD_HOSTNAME": f"host{rank % 2}"} for rank in range(4)]
    check(run([a | b for a, b in zip(environments, hosts, strict=True)], script))


def test_bootstrap_over_mpi_on_request(home):
    """A process to which MPI reports no other process raises an error instead of running alone."""
    pytest.importorskip("mpi4py")
    variables = find("mpich").environment() | {"HOROVOD_CONTROLLER": "mpi"}
    for result in run(every(srun(2), home, variables), REFUSED):
        text = refusal(result)
        assert "Slurm's srun has started 2 processes" in text
        assert "of 1: start the job with the mpirun" in text


PARTED = program_text("tests/launcher/programs/launcher_environment_jobs_parted.py")


def test_rank_0_ends_before_others_init_again(home, tmp_path):
    """Rank 0 serves the store, so its exit waits for the other ranks, for a limited time."""
    check(run(every(srun(3), home), PARTED, str(tmp_path)))


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
)
@pytest.mark.short
def test_job_across_two_hosts(home):
    """The launcher gives the two ranks different names for rank 0's host, and there is no default route."""
    environments = every(distributed(2), home)
    with Network(2, rate=0, congestion="reno") as network:
        environments[1]["MASTER_ADDR"] = network.addresses[0]
        check(run(environments, JOB, before=[network.inside(0), network.inside(1)]))
        # The host names are unknown, and the address is set.
        address = {"HOROPLUG_GLOO_RENDEZVOUS_ADDR": network.addresses[0]}
        unknown = every(srun(2, nodes=2, SLURM_STEP_NODELIST="x[1-2]"), home, address)
        check(run(unknown, JOB, before=[network.inside(0), network.inside(1)]))


CLONES = """
import horoplug.rendezvous.session as session
session.host_key = lambda name: "the boot id and the namespace of a snapshot"
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
)
@pytest.mark.parametrize("hosts", [[0, 1], [0, 0], [0, 1, 0, 1]], ids=str)
def test_hosts_that_are_clones_are_told_apart(home, hosts):
    """They have nothing by which the other one is recognised, and share no memory."""
    environments = every(distributed(len(hosts)), home)
    apart = len(set(hosts))
    script = f"{CLONES}{JOB}assert (hvd.cross_size(), hvd.local_size()) == {apart, len(hosts) // apart}\n"
    with Network(2, rate=0, congestion="reno") as network:
        for variables in environments:
            variables["MASTER_ADDR"] = network.addresses[0]
        check(run(environments, script, before=[network.inside(host) for host in hosts]))


def torchrun(*arguments, home, timeout=60):
    try:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments],
            env=environment() | home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=scaled(timeout),
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"not done after {timeout} s:\n{(error.output or b'').decode()}", pytrace=False)
    return done.returncode, done.stdout.decode()


@pytest.mark.short
def test_job_under_torchrun(home, tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "job.py"
    script.write_text(JOB)
    status, output = torchrun("--standalone", str(script), home=home)
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) of 2 is done", output)) == ["0", "1"]


def test_job_restarted_by_torchrun(home, tmp_path):
    """The ranks of the second attempt find each other and not those of the first."""
    pytest.importorskip("torch")
    script = tmp_path / "job.py"
    script.write_text(
        # Both ranks print their line before torchrun ends one because of the other.
        JOB + "sys.stdout.flush()\nhvd.barrier()\nimport os\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(3)\n"
    )
    status, output = torchrun("--max-restarts", "1", "--standalone", str(script), home=home)
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) of 2 is done", output)) == ["0", "0", "1", "1"]


def test_ranks_of_the_nodes_that_are_left_form_the_next_job_of_torchrun(home, tmp_path):
    """Two nodes on this host. The second one comes later, and is lost: torchrun starts the ranks of the first one,
    then those of both, and then those of the first one again."""
    pytest.importorskip("torch")
    script = tmp_path / "job.py"
    script.write_text(
        f"""
import os, pathlib, signal
folder = pathlib.Path({str(tmp_path)!r})
is_lost = folder / "lost"
if os.environ["WORLD_SIZE"] == "2" and not is_lost.exists():
    (folder / "waits").touch()
    signal.pause()  # torchrun ends these ranks when the second node comes
{JOB}
sys.stdout.flush()
hvd.barrier()
if hvd.size() == 4 and os.environ["NODE"] == "second":
    is_lost.touch()
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
hvd.barrier()
"""
    )
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = sock.getsockname()
    flags = [
        *("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "job"),
        *("--rdzv-endpoint", f"127.0.0.1:{address[1]}", "--rdzv-conf"),
        "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=3",
    ]
    # By default, a node that comes later waits for an address that PyTorch 2.13 publishes only for the first round.
    home |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(torchrun, *flags, str(script), home=home | {"NODE": "first"})
        until((tmp_path / "waits").exists, 40)
        second = pool.submit(torchrun, *flags, str(script), home=home | {"NODE": "second"})
        (status, output), (lost, _) = first.result(), second.result()
    assert lost == -signal.SIGKILL
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) of 2 is done", output)) == ["0", "1"]


# ---- ports in use ----------------------------------------------------------------------------------------------------


def job_ports(variables):
    """The ports of a job with the user's key in the folder of ``variables``."""
    file = Path(variables["XDG_CONFIG_HOME"]) / "horoplug" / "key"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_text(KEY.hex())
    file.chmod(0o600)
    return ports(job_secret(KEY, recognise(variables).bootstrap_address.job))


def first_port(variables):
    return job_ports(variables)[0]


def test_first_port_used_by_another_job(home):
    environments = every(srun(2), home)
    with StoreServer(bytes(32), "127.0.0.1", first_port(environments[0])):
        check(run(environments, JOB))


def test_first_port_used_by_a_silent_server(home):
    environments = every(srun(2), home)
    with socket.create_server(("127.0.0.1", first_port(environments[0]))):
        check(run(environments, JOB))


def test_all_ports_in_use_is_an_error(home):
    variables = srun(2)[0] | home
    listeners = []
    try:
        for port in job_ports(variables):
            listeners.append(socket.create_server(("127.0.0.1", port)))
        text = refusal(run([variables], REFUSED)[0])
    finally:
        for listener in listeners:
            listener.close()
    assert "HOROPLUG_GLOO_RENDEZVOUS_PORT" in text


def test_port_set_by_the_user(home):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        free = str(sock.getsockname()[1])
    check(run(every(srun(2), home, {"HOROPLUG_GLOO_RENDEZVOUS_PORT": free}), JOB))


# ---- secrets ---------------------------------------------------------------------------------------------------------


def test_shared_key_set_by_the_user(home):
    """With HOROPLUG_SECRET_KEY the home folder is not used and may be missing."""
    key = {"HOROPLUG_SECRET_KEY": os.urandom(32).hex(), "XDG_CONFIG_HOME": "/proc/nowhere"}
    check(run(every(srun(2), home, key), JOB))


def test_unshared_home_directories_are_an_error(home, tmp_path):
    limit = round(scaled(4))  # in which a rank imports the package and connects
    environments = every(srun(2), home, {"HOROPLUG_START_TIMEOUT": str(limit)})
    environments[1]["XDG_CONFIG_HOME"] = str(tmp_path / "elsewhere")
    results = run(environments, REFUSED)
    text = refusal(results[1])
    for part in (f"is not found within {limit} s", "elsewhere/horoplug/key", "HOROPLUG_SECRET_KEY"):
        assert part in text
    assert "refused: " in results[0][1]
    assert "rank 1" in results[0][1]


def test_missing_home_directory(home):
    variables = srun(2)[0] | home | {"XDG_CONFIG_HOME": "/proc/nowhere"}
    text = refusal(run([variables], REFUSED)[0])
    assert "/proc/nowhere/horoplug/key" in text
    assert "HOROPLUG_SECRET_KEY" in text


MAKE_KEY = """
import sys
from horoplug.rendezvous.bootstrap.job_key import user_key
print("ready", flush=True)
sys.stdin.read(1)
print(user_key().hex())
"""


def test_key_file_is_created_once(home):
    """Several processes start at the same moment."""
    gate, opener = os.pipe()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE_KEY],
            env=environment() | home,
            stdin=gate,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    os.close(gate)
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 8
    os.close(opener)
    keys = [process.communicate(timeout=scaled(40))[0].strip() for process in processes]
    assert len(set(keys)) == 1
    assert re.fullmatch("[0-9a-f]{64}", keys[0])
    folder = Path(home["XDG_CONFIG_HOME"]) / "horoplug"
    assert [file.name for file in folder.iterdir()] == ["key"]
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600


def test_key_file_created_concurrently(home, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", home["XDG_CONFIG_HOME"])
    other, link = os.urandom(32), os.link

    def late(source, target):
        target.touch(0o600)
        target.write_text(other.hex())
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert user_key() == other


@pytest.fixture
def key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    job_secret(None, "job")
    return tmp_path / "horoplug" / "key"


def test_secrets_differ(key):
    other = os.urandom(32)
    secrets = [job_secret(given, job) for given in (None, other) for job in ("one", "two")]
    assert len({*secrets, other, bytes.fromhex(key.read_text())}) == 6
    assert job_secret(None, "one") == secrets[0]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_key_file_readable_by_others_is_refused(key, mode):
    key.chmod(mode)
    with pytest.raises(ValueError, match=r"\A[^\n]*remove it[^\n]*\Z"):
        job_secret(None, "job")


@pytest.mark.parametrize("content", ["", "00", "x" * 64, "\0" * 1000])
def test_invalid_key_file_is_refused(key, content):
    key.write_text(content)
    with pytest.raises(ValueError, match=r"\A[^\n]*holds no key[^\n]*\Z"):
        job_secret(None, "job")


def test_key_file_of_another_user_is_refused(key, monkeypatch):
    owner = key.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=r"\A[^\n]*not a file of this user's[^\n]*\Z"):
        job_secret(None, "job")


# ---- rank 0 is missing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["nowhere.invalid", "localhost"])
def test_missing_rank_0_is_named(home, host):
    variables = distributed(2)[1] | home | {"MASTER_ADDR": host, "HOROPLUG_START_TIMEOUT": "2"}
    text = refusal(run([variables], REFUSED)[0])
    for part in ("rank 0 of 2", host, "within 2 s", "HOROPLUG_GLOO_RENDEZVOUS_ADDR"):
        assert part in text


def test_different_job_sizes_are_refused(home):
    limit = str(round(scaled(4)))  # in which a rank imports the package and connects
    environments = every(distributed(2), home, {"HOROPLUG_START_TIMEOUT": limit})
    environments[1]["WORLD_SIZE"] = "3"
    texts = [refusal(result) for result in run(environments, REFUSED)]
    assert any("rank 1" in text and "3" in text for text in texts), texts


def test_unresponsive_server_is_an_error_in_time(home):
    """A server accepts connections on every port and sends nothing."""
    variables = distributed(2)[1] | home | {"HOROPLUG_START_TIMEOUT": "2"}
    variables["HOROPLUG_GLOO_RENDEZVOUS_ADDR"] = "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables["HOROPLUG_GLOO_RENDEZVOUS_PORT"] = str(listener.getsockname()[1])
        text = refusal(run([variables], REFUSED, timeout=20)[0])
    assert "within 2 s" in text
