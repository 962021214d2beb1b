"""Each wheel for this machine's architecture, installed with its Python. Not part of make test: make test-wheels."""

import re
import sys

import pytest

from tests.harness import ROOT, program_text
from tests.harness.wheels import run, wheel

sys.path.append(str(ROOT / "scripts" / "wheels"))

from pythons import pythons

PYTHONS = pythons()

REDUCE = program_text("tests/wheels/programs/installed_reduce.py")
# Those for frameworks that are not installed say so; nothing else goes wrong.
IMPORT_ALL = program_text("tests/wheels/programs/installed_import_all.py")
LEAVE = """
import os, signal
import horoplug as hvd

hvd.init()
hvd.allreduce(1.0, name="first")
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce(1.0, name="second")
"""


@pytest.fixture(scope="module", params=sorted(PYTHONS))
def installed(request, tmp_path_factory):
    """The folder of a new environment's programs, with the wheel and what it needs."""
    folder = tmp_path_factory.mktemp(request.param)
    run(PYTHONS[request.param], "-m", "venv", folder)
    # Of newer versions, NumPy has no wheel for 3.13t, and compiles for minutes.
    options = ("-q", "--only-binary=numpy")
    run(folder / "bin" / "python", "-m", "pip", "install", *options, wheel(request.param))
    return folder / "bin"


def horovodrun(programs, code, check=True):
    # Not in the checkout, where Python would import that one.
    command = (programs / "horovodrun", "-np", "2", programs / "python", "-c", code)
    return run(*command, check=check, cwd=programs)


def test_two_ranks_use_a_wheel(installed):
    said = horovodrun(installed, REDUCE).stdout
    for rank in range(2):
        assert f"[{rank}]<stdout>:[2.0, 2.0, 2.0] [0, 1, 1] from rank 0\n" in said


def test_all_modules_can_be_imported(installed):
    assert run(installed / "python", "-c", IMPORT_ALL, cwd=installed).stdout.endswith("imported\n")


def test_killed_rank_is_named(installed):
    done = horovodrun(installed, LEAVE, check=False)
    assert done.returncode != 0
    assert "rank 1" in done.stdout + done.stderr
    # Rank 0 may still wait for the first operation, of which rank 1 had the result.
    assert re.search(
        r"'allreduce\.(first|second)' failed: rank 1 has died", done.stdout + done.stderr
    )


def test_uninstalls_completely(installed):
    run(installed / "python", "-m", "pip", "uninstall", "-y", "horoplug")
    (packages,) = (installed.parent / "lib").glob("python3*/site-packages")
    assert not list(packages.glob("horoplug*"))
