"""Horovod's API, tested as its users do: every rank runs the same pytest (see tests/api/horovod_api/conftest.py and
tests/api/horovod_tensorflow_api/conftest.py)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.harness.elastic_launcher import PRELOADS, launcher
from tests.harness.limits import scaled
from tests.harness.support import QUICK_XLA, environment

FOLDER = Path(__file__).parent / "horovod_api"
FILES = [
    "test_basics.py",
    "test_handles.py",
    "test_names.py",
    "test_allreduce.py",
    "test_allgather.py",
    "test_broadcast.py",
    "test_alltoall.py",
    "test_reducescatter.py",
    "test_compression.py",
    "test_sparse.py",
    "test_parameters.py",
    "test_optimizer_state.py",
    "test_optimizer.py",
    "test_process_sets.py",
    "test_join.py",
    "test_timeline.py",
    "test_sync_batch_norm.py",
    "test_elastic.py",
]


def run(files: list[str], size: int, timeout: float, folder: Path = FOLDER) -> list[str]:
    """The last line of pytest's output on every rank, without the time."""
    framework = "torch" if folder == FOLDER else "tensorflow"
    command = [*launcher(f"{PRELOADS[framework]},pytest"), "--compat", "-np", str(size)]
    command += [sys.executable, "-m", "pytest", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "no:logging"]
    command += [str(folder / name) for name in files]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment() | {"TF_CPP_MIN_LOG_LEVEL": "2"} | QUICK_XLA,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=scaled(timeout))
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            output, _ = process.communicate(timeout=scaled(30))
            pytest.fail(f"not done after {timeout:g} s:\n{output}", pytrace=False)
    if process.returncode:
        pytest.fail(f"exit code {process.returncode}:\n{output}", pytrace=False)
    return re.findall(r"^\[\d+\]<stdout>:(\d+ .*) in [\d.]+s", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.matrix), 3])
@pytest.mark.short
def test_horovod_torch_api(size):
    lines = run(FILES, size, timeout=350)
    assert len(lines) == size
    assert re.fullmatch(r"\d+ passed(, \d+ warnings?)?", lines[0])
    assert len({line.split()[0] for line in lines}) == 1, lines


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.short
def test_horovod_tensorflow_api():
    pytest.importorskip("tensorflow")
    folder = FOLDER.with_name("horovod_tensorflow_api")
    lines = run([path.name for path in folder.glob("test_*.py")], 2, 350, folder)
    assert len(lines) == 2
    assert re.fullmatch(r"\d+ passed(, \d+ warnings?)?", lines[0])
    assert len({line.split()[0] for line in lines}) == 1, lines


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.short("2")
def test_horovod_adasum_api(size):
    assert run(["test_adasum.py"], size, timeout=150) == ["15 passed"] * size


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_hundreds_of_init_cycles_in_one_process():
    assert run(["test_cycles.py"], 3, timeout=150) == ["301 passed"] * 3
