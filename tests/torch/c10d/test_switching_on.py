"""How a program gets the backend: by PyTorch's entry points, by an import, or in place of Gloo."""

import subprocess
import sys

import pytest

from tests.harness.limits import scaled
from tests.harness.support import environment

# A group of one rank. Says which modules "import torch" alone has loaded, and what the group is.
PROGRAM = """
import sys
{imports}
import torch.distributed as dist
early = [name for name in sys.modules if name.startswith("horoplug.") and name != "horoplug.torch_plugin"]
print("early:", [name for name in early if name.startswith(("horoplug.torch.", "horoplug._native"))])
dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print("group:", type(dist.group.WORLD).__module__, dist.get_backend())
dist.destroy_process_group()
"""


def python(*arguments, **variables):
    """Outside the source tree, so that PyTorch finds the entry points as in an installed package."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment() | variables,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(90),
        check=False,
    )


def run(backend="horoplug", imports="import torch", **variables):
    process = python("-c", PROGRAM.format(backend=backend, imports=imports), **variables)
    return process.stdout, process.stderr.strip().splitlines(), process.returncode


@pytest.mark.short
def test_without_any_import():
    output, errors, code = run()
    assert code == 0, errors
    assert output == "early: []\ngroup: horoplug.torch.c10d.process_group horoplug\n"
    assert not errors


def test_with_an_import_where_pytorch_loads_no_entry_points():
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    output, errors, code = run(imports="import torch, horoplug.torch", **off)
    assert code == 0, errors
    assert output.endswith("group: horoplug.torch.c10d.process_group horoplug\n")


@pytest.mark.parametrize("name", ["HOROPLUG_AS_GLOO", "HOROVOD_AS_GLOO"])
@pytest.mark.short
def test_in_place_of_gloo(name):
    output, errors, code = run("gloo", **{name: "1", "HOROPLUG_LOG_HIDE_TIME": "1"})
    assert code == 0, errors
    assert output.endswith("group: horoplug.torch.c10d.gloo gloo\n")
    assert len(errors) == 1
    assert 'horoplug stands in for the backend "gloo" of torch.distributed' in errors[0]


def test_gloo_stays_what_it_is_unless_asked_for():
    output, errors, code = run("gloo", HOROPLUG_AS_GLOO="0")
    assert code == 0, errors
    assert "horoplug" not in output.splitlines()[1]
    assert not errors


def test_flag_of_the_launcher(tmp_path):
    """``horovodrun --as-gloo`` reaches programs and the launchers that they start, such as torchrun."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(backend="gloo", imports="import torch"))
    launcher = ("-m", "horoplug.runner.launch", "-np", "1", "--as-gloo", sys.executable)
    process = python(*launcher, str(program))
    assert process.returncode == 0, process.stderr
    assert "group: horoplug.torch.c10d.gloo gloo" in process.stdout


TRAINING = """
import sys, torch, torch.distributed as dist
dist.init_process_group("{backend}")
rank = dist.get_rank()
tensor = torch.tensor([float(rank + 1)])
dist.all_reduce(tensor)
# In one piece, since all ranks write to one pipe.
sys.stdout.write(f"{{type(dist.group.WORLD).__module__}} rank {{rank}} sum {{tensor.item()}}\\n")
dist.destroy_process_group()
"""


@pytest.mark.short
def test_torchrun(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(TRAINING.format(backend="cpu:horoplug,cuda:nccl"))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    process = python(*launcher, str(program))
    assert process.returncode == 0, process.stderr
    lines = sorted(process.stdout.splitlines())
    assert lines == [f"horoplug.torch.c10d.process_group rank {rank} sum 6.0" for rank in range(3)]
