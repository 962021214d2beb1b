"""The order in which ``pytest -n`` runs the tests (tests/harness/scheduling.py), in sessions of made-up tests."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, scheduling
from tests.harness.limits import scaled
from tests.harness.support import environment, seed

pytest.importorskip("xdist", reason="needs pytest-xdist")

# Each test writes a line at its begin and at its end, and the fixture of a module at its end.
MODULE = """
import os, time
import pytest

def log(what, name):
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with open("log", "a") as file:
        file.write(f"{worker} {what} {name}\\n")

@pytest.fixture(scope="module", autouse=True)
def shared():
    yield
    time.sleep(0.05)
    log("torn", __file__)

@pytest.mark.parametrize("number", range(COUNT))
def test_made_up(request, number):
    name = f"{os.path.relpath(__file__)}::{request.node.name}"
    log("begin", name)
    time.sleep(0.01 * (hash(name) % 5))
    if os.environ.get("CRASH") == name and not os.path.exists("crashed"):
        open("crashed", "w").close()
        os._exit(1)
    log("end", name)
"""


def run(folder: Path, files: dict[str, int], *options: str, **variables: str):
    """Run a session of files with so many tests. Returns its output and the lines that its tests have written."""
    for name, count in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(MODULE.replace("COUNT", str(count)))
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib -ra\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.harness.scheduling", *options]
    done = subprocess.run(
        [*command, f"--rootdir={folder}", "-p", "no:cacheprovider"],
        cwd=folder,
        env=environment() | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    return done.stdout, [line.split() for line in (folder / "log").read_text().splitlines()]


def check_alone(lines):
    """While a test that must be alone runs, nothing else does."""
    for number, (worker, what, name) in enumerate(lines):
        if scheduling.group_of(name) == "alone" and what == "begin":
            assert lines[number + 1] == [worker, "end", name]


def check(lines, files):
    """Each test ran once, those of a group in one worker, and those that must be alone after all others."""
    begun = [(worker, name) for worker, what, name in lines if what == "begin"]
    tests = [f"{file}::test_made_up[{n}]" for file, count in files.items() for n in range(count)]
    assert sorted(name for _, name in begun) == sorted(tests)
    alone = [scheduling.group_of(name) == "alone" for _, name in begun]
    assert alone == sorted(alone)
    order = [name.partition("::")[0] for (_, name), each in zip(begun, alone, strict=True) if each]
    assert list(dict.fromkeys(order)) == [file for file in scheduling.ALONE if file in files]
    for group in {scheduling.group_of(name) for _, name in begun}:
        assert len({w for w, name in begun if scheduling.group_of(name) == group}) == 1, group
    check_alone(lines)
    # All that the others did, up to the ends of their fixtures, was before.
    if any(alone):
        (worker,) = {w for (w, _), each in zip(begun, alone, strict=True) if each}
        first = next(i for i, line in enumerate(lines) if scheduling.group_of(line[2]) == "alone")
        assert {w for w, _, _ in lines[first:]} == {worker}


def made_up(draw):
    """Numbers of tests in some files of each kind."""
    files = [
        *scheduling.ALONE,
        "tests/mpi/test_mpirun.py",
        "tests/gpu/test_mpi.py",
        *scheduling.GROUPS["hosts"],
        *scheduling.SPLIT,
        *(f"tests/core/test_{n}.py" for n in range(5)),
    ]
    files = draw.sample(files, draw.randint(1, len(files)))
    return {file: draw.choice([1, 1, 2, 9]) for file in files}


@pytest.mark.parametrize("workers", [2, 3])
def test_every_test_runs_once_and_exclusive_files_run_alone(workers, tmp_path):
    draw = random.Random(seed())
    for number in range(2):
        files = made_up(draw)
        (folder := tmp_path / str(number)).mkdir()
        output, lines = run(folder, files, "-n", str(workers))
        assert output.splitlines()[-1].split()[1:3] == [str(sum(files.values())), "passed"], output
        check(lines, files)


ALONE = [*scheduling.ALONE]


@pytest.mark.parametrize(
    "files",
    [
        {ALONE[0]: 1},
        {ALONE[0]: 1, ALONE[1]: 1, ALONE[-1]: 2},
        {"tests/core/test_a.py": 1, ALONE[-1]: 1},
        {"tests/core/test_a.py": 9, "tests/core/test_b.py": 1, ALONE[-1]: 1},
    ],
    ids=["one", "only exclusive ones", "two", "a late worker"],
)
def test_few_tests(files, tmp_path):
    output, lines = run(tmp_path, files, "-n", "3")
    assert f" {sum(files.values())} passed in " in output
    check(lines, files)


def test_without_workers_exclusive_files_run_last(tmp_path):
    files = {ALONE[-1]: 1, ALONE[0]: 1, "tests/core/test_a.py": 2, "tests/mpi/test_a.py": 1}
    output, lines = run(tmp_path, files, "-n", "0")
    assert " 5 passed in " in output
    check(lines, files)


def test_a_worker_that_crashes_is_replaced(tmp_path):
    crash = "tests/core/test_a.py::test_made_up[0]"
    files = {"tests/core/test_a.py": 3, "tests/core/test_b.py": 9, ALONE[0]: 2, ALONE[-1]: 1}
    output, lines = run(tmp_path, files, "-n", "2", CRASH=crash)
    assert re.search(rf"^FAILED {re.escape(crash)} - worker 'gw\d' crashed ", output, re.M), output
    assert " 1 failed, 15 passed in " in output  # pytest-xdist runs the test once more
    ended = [name for _, what, name in lines if what == "end"]
    assert len(ended) == len(set(ended)) == 15
    check_alone(lines)


def test_scheduled_files_exist():
    grouped = [file for files in scheduling.GROUPS.values() for file in files]
    for file in [*scheduling.ALONE, *grouped, *scheduling.SPLIT]:
        assert (ROOT / file).exists(), file


def test_files_of_a_group_go_to_one_worker_and_other_files_to_any():
    for name, files in scheduling.GROUPS.items():
        for file in files:
            example = f"{file}test_any.py" if file.endswith("/") else file
            assert scheduling.group_of(f"{example}::test_a[1]") == name
    assert scheduling.group_of("tests/core/test_join.py::test_a") == "tests/core/test_join.py"


def test_leftovers_test_runs_last():
    assert ALONE[-1].endswith("test_leftovers.py")
