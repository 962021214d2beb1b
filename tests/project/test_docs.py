"""The commands in the guides about starting a job run; code that cannot run here at least parses.

A block that is marked ``sh run`` is run unchanged, in a folder with a small train.py. Further words give its
requirements: ``checkout``: run in the checkout; ``mpi``: with the mpirun of any MPI; ``openmpi``, ``mpich``: with the
mpirun of that MPI; ``torch``: needs PyTorch; ``hosts``: run on the first of two hosts; ``each``: on both of them;
``slurm``: a script for sbatch; ``slurm-shell``: needs Slurm's programs."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from horoplug.rendezvous.bootstrap.launcher_environment import LAUNCHERS
from tests.harness import ROOT
from tests.harness.netns import Cluster, finish, why_not
from tests.harness.slurm_daemons import batch, slurm
from tests.harness.support import environment

sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import mpi

from tests.harness.limits import scaled

__all__ = ["slurm"]  # a fixture

HOSTFILE = ROOT / "docs/launch-ssh.md"
PAGES = sorted(ROOT.glob("docs/launch*.md"))
KNOWN = {
    "run",
    "checkout",
    "each",
    "hosts",
    "mpi",
    "mpich",
    "openmpi",
    "torch",
    "slurm",
    "slurm-shell",
}

TRAIN = """
import sys
import numpy as np
import horoplug as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
assert hvd.allgather(np.array([rank])).tolist() == [*range(size)]
sys.stdout.write(f"rank {rank} of {size} is done\\n")
"""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    words: list[str]
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks():
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page.name, line, match[1], match[2].split(), match[3]))
    return found


BLOCKS = blocks()
TO_RUN = [block for block in BLOCKS if block.words]


@pytest.mark.short
def test_documentation_has_commands_to_run():
    assert len(TO_RUN) > 10
    assert all(block.language == "sh" and block.words[0] == "run" for block in TO_RUN)
    assert {word for block in TO_RUN for word in block.words} <= KNOWN


def variables_of(block, tmp_path):
    """The variables that a block needs. Skips the test if a requirement is missing."""
    variables = {"XDG_CONFIG_HOME": str(tmp_path)}
    if "torch" in block.words and importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    if kinds := [kind for kind in mpi.KINDS if {"mpi", kind} & {*block.words}]:
        pytest.importorskip("mpi4py")
        found = next(filter(None, map(mpi.find, kinds)), None)
        if found is None:
            pytest.skip("needs an MPI: make mpi")
        variables |= found.environment()
    return variables


def check(block, output):
    """Check that all ranks of all jobs have finished and that there is no error."""
    if "train.py" in block.text:
        done = Counter(
            (int(n), int(r)) for r, n in re.findall(r"rank (\d+) of (\d+) is done", output)
        )
        assert done, output
        for size in {size for size, _ in done}:
            assert len({done[size, rank] for rank in range(size)}) == 1, output
    if "allreduce.py" in block.text:
        assert "# wrong results: 0" in output
    if "--check-build" in block.text:
        assert "Launcher:" in output


@pytest.fixture(scope="module")
def cluster():
    if why_not():
        pytest.skip(why_not())
    with Cluster(2, devices=["ib", "ib"], names=["node1", "node2"]) as made:
        yield made


def run_on_hosts(cluster, block, variables):
    """Run a block with an ssh that never prompts and an MPI that forwards the choice of its library."""
    agents = ("PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC")
    variables = dict.fromkeys(agents, str(cluster.rsh)) | variables
    rack = re.findall(r"^    .*(?:rack|node\d).*\n", HOSTFILE.read_text(), re.MULTILINE)
    assert len(rack) == 4
    Path("hosts.txt").write_text("".join(rack))
    hosts = (0, 1) if "each" in block.words else (0,)
    started = [cluster.popen(host, "bash", "-ec", block.text, env=variables) for host in hosts]
    ends = [finish(process, 100) for process in started]
    assert not any(status for status, _, _ in ends), ends
    return "".join(output for _, output, _ in ends)


@pytest.mark.parametrize("block", TO_RUN, ids=str)
@pytest.mark.short
def test_command_of_the_documentation(block, tmp_path, request, monkeypatch):
    variables = variables_of(block, tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    if "slurm" in block.words:
        script = tmp_path / "script.sh"
        script.write_text(block.text)
        run = request.getfixturevalue("slurm")
        check(block, batch(run, script, f"--chdir={tmp_path}", **variables))
        return
    if "hosts" in block.words:
        monkeypatch.chdir(tmp_path)
        cluster = request.getfixturevalue("cluster")
        check(block, run_on_hosts(cluster, block, variables))
        cluster.wait_gone()
        return
    command = ["bash", "-e", "-o", "pipefail", "-c", block.text]
    if "slurm-shell" in block.words:
        run = request.getfixturevalue("slurm")
        status, output = run(*command, folder=tmp_path, **variables)
    else:
        done = subprocess.run(
            command,
            cwd=ROOT if "checkout" in block.words else tmp_path,
            env=environment() | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=scaled(100),
        )
        status, output = done.returncode, done.stdout
    assert status == 0, output
    check(block, output)


@pytest.mark.short
def test_other_code_blocks_parse():
    """Blocks of YAML and Python parse, and those for shells have no syntax error."""
    yaml = pytest.importorskip("yaml")
    for block in BLOCKS:
        if block.language == "yaml":
            for document in yaml.safe_load_all(block.text):
                assert isinstance(document, dict), block
        elif block.language == "python":
            ast.parse(block.text)
        else:
            assert block.language == "sh", block
            subprocess.run(["bash", "-n", "-c", block.text], check=True)


@pytest.mark.short
def test_kubernetes_guide_creates_the_key():
    """Under the name of the secret and of the file that the manifests in examples/kubernetes use."""
    text = (ROOT / "docs" / "launch-kubernetes.md").read_text()
    assert "create secret generic horoplug --from-literal=key=" in text
    manifests = [path.read_text() for path in (ROOT / "examples" / "kubernetes").glob("*.yaml")]
    users = [text for text in manifests if "HOROPLUG_SECRET_FILE" in text]
    assert len(users) == 4
    for text in users:
        assert "secret: {secretName: horoplug, defaultMode: 0440}" in text
        assert "{name: HOROPLUG_SECRET_FILE, value: /etc/horoplug/key}" in text


@pytest.mark.short
def test_guide_lists_every_launcher():
    """The page's table equals the code's, in the same order."""
    rows = re.findall(
        r"^\| ([^|]+) \| `(\w+)` \| `(\w+)` \|([^|]*)\|",
        (ROOT / "docs" / "launching.md").read_text(),
        re.M,
    )
    found = [(name, rank, size, *re.findall(r"\w+", also)) for name, rank, size, also in rows]
    assert found == [(each.name, *each.variables) for each in LAUNCHERS]
