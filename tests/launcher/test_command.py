"""The command ``horoplug``: benchmark, check, and completion in a shell."""

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest

from tests.harness import ROOT
from tests.harness.limits import scaled

CALL = "import sys; from horoplug.cli import main; sys.exit(main())"


def horoplug(*words, status=0):
    done = subprocess.run(
        [sys.executable, "-c", CALL, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=scaled(100),
        cwd=ROOT,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.short
def test_lists_its_commands():
    said = horoplug()
    for name in ("run", "bench", "check", "completion"):
        assert f"\n  {name} " in said


@pytest.mark.short
def test_unknown_command_is_one_line():
    said = horoplug("trian", status=2)
    assert said == "horoplug: no command 'trian'; there are run, bench, check, completion\n"


@pytest.mark.short
def test_run_is_horovodrun():
    code = "import horoplug as hvd; hvd.init(); print('rank', hvd.rank())"
    said = horoplug("run", "-np", "2", sys.executable, "-c", code)
    assert {"[0]<stdout>:rank 0", "[1]<stdout>:rank 1"} <= {*said.splitlines()}
    assert "Give -np N" in horoplug("run", "python", status=2)


@pytest.mark.short
def test_check_says_what_works():
    said = horoplug("check")
    assert "[X] NumPy" in said
    assert "CPU kernels: " in said


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ["--collective", "allreduce", "--op", "avg"]),
        (3, ["--collective", "allgather", "--dtype", "float16"]),
        (2, ["--collective", "reducescatter", "--dtype", "bfloat16"]),
        (3, ["--collective", "alltoall", "--dtype", "int64"]),
        (2, ["--collective", "broadcast"]),
        (2, ["--collective", "sendrecv"]),
    ],
)
@pytest.mark.short
def test_bench_measures_each_size(tmp_path, ranks, options):
    file = tmp_path / "rows.json"
    limits = ["-b", "8", "-e", "4K", "-f", "8", "-n", "20", "--json", str(file)]
    said = horoplug("bench", "-np", str(ranks), *limits, *options)
    assert "# wrong results: 0" in said
    record = json.loads(file.read_text())
    assert record["ranks"] == ranks
    assert [row["wrong"] for row in record["rows"]] == [0] * len(record["rows"])
    assert len(record["rows"]) >= 3
    assert all(row["time"] > 0 and row["n"] == 20 for row in record["rows"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--dtype", "float33"], "--dtype float33"),
        (["-f", "1"], "-f greater than 1"),
        (["--collective", "reducescatter", "--op", "max"], "--op sum and avg only"),
    ],
)
@pytest.mark.short
def test_bench_refuses_what_cannot_be_measured(words, text):
    assert text in horoplug("bench", *words, status=2)


def type_and_complete(script, text, wanted):
    """What an interactive bash shows after a line and two tabs, once it contains a text."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        os.write(terminal, f"source {script}; cd {script.parent}\n{text}\t\t".encode())
        shown, end = b"", time.monotonic() + scaled(20)
        while wanted.encode() not in shown and time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 65536)
        return shown.decode(errors="replace")
    finally:
        os.write(terminal, b"\x03exit\n")
        os.close(terminal)
        os.waitpid(child, 0)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("program", "text", "wanted"),
    [
        ("horoplug", "horoplug ben", "horoplug bench "),
        ("horoplug", "horoplug run --check-b", "--check-build "),
        ("horoplug", "horoplug run -np 2 python tra", "python train.py "),
        ("horoplug", "horoplug bench --collective reduc", "reducescatter "),
        ("horovodrun", "horovodrun --check-b", "--check-build "),
        ("horovodrun", "horovodrun -np 2 python tra", "python train.py "),
    ],
)
@pytest.mark.short
def test_bash_completes(tmp_path, program, text, wanted):
    script = tmp_path / "completion"
    script.write_text(horoplug("completion", "bash", program))
    (tmp_path / "train.py").touch()
    assert wanted in type_and_complete(script, text, wanted)


@pytest.mark.short
def test_completion_says_what_to_install(tmp_path):
    (tmp_path / "shtab.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, "-c", CALL, "completion", "bash"],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (
        2,
        "horoplug: pip install shtab, which writes the completions\n",
    )
