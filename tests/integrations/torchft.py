"""torchft on horoplug: groups that lose a member, in place of Gloo and by horoplug's own classes."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.harness import ROOT
from tests.harness.integrations import runs
from tests.harness.limits import scaled
from tests.harness.support import environment

FOLDER = ROOT / "build" / "torchft"
# Two members in threads of one process, which meet twice.
PROGRAM = """
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import torch, torch.distributed as dist
from torchft.process_group import ProcessGroupGloo, reconfigure_with_store
{imports}
limit = timedelta(seconds=30)
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
groups = [{name}(timeout=limit) for _ in range(3)]

def run(rank, members, number):
    address = f"localhost:{{store.port}}/{{number}}"
    reconfigure_with_store(groups[rank], address, members.index(rank), len(members), limit)
    tensor = torch.tensor([2.0**rank])
    groups[rank].allreduce([tensor], dist.ReduceOp.SUM).wait()
    assert groups[rank].size() == len(members)
    return int(tensor)

for number, members in enumerate(([0, 1, 2], [2, 0], [1, 2])):
    with ThreadPoolExecutor(3) as threads:
        sums = list(threads.map(lambda rank: run(rank, members, number), members))
    assert sums == [sum(2**each for each in members)] * len(members), sums
parent = groups[1].parent
print(type(parent).__module__, type(getattr(parent, "_get_backend")(torch.device("cpu"))).__module__)
for group in groups:
    group.shutdown()
"""
OWN = "from horoplug.torch.c10d.torchft import ProcessGroupHoroplug"


NEEDS_BACKENDS = pytest.mark.skipif(
    torch.__version__ < "2.14", reason="PyTorch's Backend has no constructor"
)


def with_torchft():
    if not FOLDER.is_dir():
        pytest.skip("make torchft installs torchft")
    path = os.pathsep.join([str(FOLDER), environment().get("PYTHONPATH", ""), str(ROOT)])
    return environment() | {"PYTHONPATH": path}


def run(name, imports="", **variables):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(name=name, imports=imports)],
        env=with_torchft() | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )


def test_own_class():
    done = run("ProcessGroupHoroplug", OWN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("horoplug.torch.c10d.process_group ")


@NEEDS_BACKENDS
def test_in_place_of_gloo():
    done = run("ProcessGroupGloo", HOROPLUG_AS_GLOO="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" horoplug.torch.c10d.gloo\n")


BABY_GROUPS = {
    "own class": ("horoplug.torch.c10d.torchft", "ProcessGroupBabyHoroplug", {}),
    "in place of Gloo": (
        "torchft.process_group",
        "ProcessGroupBabyGloo",
        {"HOROPLUG_AS_GLOO": "1"},
    ),
}


@pytest.fixture
def replicas():
    """Starts replicas, and ends those that a failed test leaves."""
    started = []

    def start(index, *arguments, variables):
        command = [sys.executable, runs.FOLDER / "torchft_replica.py", *arguments]
        command.insert(3, str(index))
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        started.append(
            subprocess.Popen(
                command,
                env=with_torchft() | variables,
                stdin=subprocess.DEVNULL,
                text=True,
                **pipes,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("killed", ["child", "replica"])
@pytest.mark.parametrize(
    "group", ["own class", pytest.param("in place of Gloo", marks=NEEDS_BACKENDS)]
)
def test_group_in_a_child_process_goes_on_after_a_kill(replicas, killed, group):
    module, kind, variables = BABY_GROUPS[group]
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    arguments = (f"localhost:{store.port}", killed, module, kind)
    members = [replicas(index, *arguments, variables=variables) for index in range(2)]
    outputs = [process.communicate(timeout=runs.SECONDS) for process in members]
    ends = [0, 0] if killed == "child" else [0, -signal.SIGKILL]
    assert [process.returncode for process in members] == ends, outputs
    seen = [json.loads(output) for output, _ in outputs if output]
    assert len(seen) == ends.count(0)
    for each in seen:
        assert each["before"] == [3.0] * 3
        assert each["after"] == [3.0 if killed == "child" else 1.0] * 3
        assert each["seconds"] < 50  # half of the time limit
    # The first replica learns from its own child that the other one is lost, and the second one that it has no child.
    assert "rank 1" in seen[0]["error"]
    assert seen[0]["error"].startswith("DistBackendError: rank 0: ")
    if killed == "child":
        assert seen[1]["error"].startswith(("EOFError", "BrokenPipeError", "ConnectionResetError"))
