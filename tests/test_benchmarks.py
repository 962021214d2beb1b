"""The benchmarks run, and their own checks find the results right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def sweep(tmp_path, *options):
    """Rows of a small sweep on two ranks, and the text that was printed."""
    table = tmp_path / "table.json"
    command = [sys.executable, ROOT / "benchmarks" / "allreduce.py", "-np", "2", "-n", "5"]
    command += ["-b", "8", "-e", "8K", "-f", "8", "--json", table, *options]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(table.read_text())["rows"], done.stdout


@pytest.mark.parametrize(
    ("collective", "bus_factor"),
    [
        ("allreduce", 1),
        ("allgather", 0.5),
        ("broadcast", 1),
        ("alltoall", 0.5),
        ("reducescatter", 0.5),
    ],
)
def test_sweep(tmp_path, collective, bus_factor):
    rows, text = sweep(tmp_path, "--collective", collective)
    assert [row["size"] for row in rows] == [8, 64, 512, 4096]
    assert [row["wrong"] for row in rows] == [0, 0, 0, 0]
    for row in rows:
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * bus_factor)
    assert "# wrong elements: 0;" in text


@pytest.mark.parametrize("op", ["avg", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_ops_and_dtypes(tmp_path, op, dtype):
    rows, _ = sweep(tmp_path, "--op", op, "--dtype", dtype)
    assert sum(row["wrong"] for row in rows) == 0


def test_peer(tmp_path):
    pytest.importorskip("torch")
    rows, text = sweep(tmp_path, "--peer", "torch-gloo")
    assert "ratio" in text
    assert all(row["ratio"] == pytest.approx(row["peer_us"] / row["time_us"]) for row in rows)


@pytest.mark.parametrize("options", [[], ["-np", "2", "--groups", "3"], ["-np", "1", "--cpu"]])
def test_hooks(tmp_path, options):
    pytest.importorskip("torch")
    table = tmp_path / "table.json"
    command = [sys.executable, ROOT / "benchmarks" / "torch_hooks.py", *options]
    command += ["--parameters", "20", "--iterations", "3", "--json", table]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(table.read_text())
    assert row.keys() == {"ranks", "hooks", "backward", "finish"}
    assert row["ranks"] == (2 if "2" in options else 1)
    assert row["hooks"] > 0
    assert row["finish"] > 0
