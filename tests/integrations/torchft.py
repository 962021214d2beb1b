"""torchft on horoplug: its manager with a group that loses a member, in place of Gloo and by horoplug's own class."""

import os
import subprocess
import sys

import pytest
import torch

from tests.harness import ROOT
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


def run(name, imports="", **variables):
    if not FOLDER.is_dir():
        pytest.skip("make torchft installs torchft")
    path = os.pathsep.join([str(FOLDER), environment().get("PYTHONPATH", ""), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(name=name, imports=imports)],
        env=environment() | {"PYTHONPATH": path} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_own_class():
    done = run("ProcessGroupHoroplug", OWN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("horoplug.torch.c10d.process_group ")


@pytest.mark.skipif(torch.__version__ < "2.14", reason="PyTorch's Backend has no constructor")
def test_in_place_of_gloo():
    done = run("ProcessGroupGloo", HOROPLUG_AS_GLOO="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" horoplug.torch.c10d.gloo\n")
