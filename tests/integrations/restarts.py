"""torchrun and its agent start the ranks of the backend again after a failure."""

import socket
import subprocess
import sys

import pytest

from tests.harness.integrations import runs
from tests.harness.support import environment

PROGRAM = runs.FOLDER / "restarted_training.py"


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What training without a failure ends with, by number of ranks. On gloo."""
    found = {}

    def train(size):
        if size not in found:
            folder = tmp_path_factory.mktemp("gloo")
            code = f"import sys; sys.path.insert(0, {str(runs.FOLDER)!r}); import restarted_training as t\n"
            program = folder / "program.py"
            program.write_text(code + "t.FAILS_AT = None\nt.train(sys.argv[1], '', 'gloo')\n")
            runs.run([*runs.torchrun(size), program, folder])
            found[size] = runs.results(folder, size)[0]
        return found[size]

    return train


def check(folder, expected, size=2):
    """The second attempt has begun at the checkpoint of step 4 and ends with what one attempt ends with."""
    for each in runs.results(folder, size):
        assert (each["begin"], each["size"]) == (4, size)
        runs.assert_close(each, expected(size))


@pytest.mark.parametrize("failure", ["kill", "raise"])
def test_torchrun_starts_the_ranks_again(tmp_path, expected, failure):
    command = runs.torchrun(2, "--max-restarts=1", "--monitor-interval=0.1")
    runs.run([*command, PROGRAM, tmp_path, failure])
    check(tmp_path, expected)


def test_the_agents_function_starts_the_ranks_again(tmp_path, expected):
    """As programs do that start their own processes, such as TorchDistributor on one machine."""
    runs.run([sys.executable, PROGRAM, tmp_path, "kill", "launch"])
    check(tmp_path, expected)


def test_two_agents_start_the_ranks_again(tmp_path, expected):
    with socket.socket() as sock:  # the port is free again, and the agents take it at once
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    agent = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--max-restarts=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"),
        *("--rdzv-id=job", "--monitor-interval=0.1", str(PROGRAM), str(tmp_path), "kill"),
    ]
    agents = [
        subprocess.Popen(
            ["timeout", "-k", "5", str(runs.SECONDS), *agent],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in agents]
    assert [process.returncode for process in agents] == [0, 0], outputs
    check(tmp_path, expected)


def test_without_restarts_the_job_ends(tmp_path):
    """The surviving rank ends, and torchrun names the one that failed."""
    done = runs.run([*runs.torchrun(2), PROGRAM, tmp_path, "raise"], code=1)
    assert "RuntimeError: this rank fails once" in done.stderr
    assert "rank      : 1" in done.stderr
