"""Jobs between network namespaces: each rank has its own network, like a host."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.harness import ROOT
from tests.harness.limits import scaled

BENCHMARK = ROOT / "benchmarks" / "network.py"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="needs root and iproute2",
)


def namespaces(pid):
    """The existing network namespaces of a run of the benchmark."""
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return re.findall(rf"^hp{pid}[bh]\d*", shown.stdout, re.MULTILINE)


def start(*options):
    command = [sys.executable, str(BENCHMARK), "-n", "3", "-f", "64", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    "options",
    [("--rate", "0"), ("--rate", "1000", "--streams", "3"), ("--algorithm", "ring")],
    ids=["unshaped", "streams", "ring"],
)
def test_benchmark_results_between_namespaces(tmp_path, options):
    table = tmp_path / "rows.json"
    process = start("--hosts", "2,3", "-e", "1M", "--json", str(table), *options)
    text, _ = process.communicate(timeout=scaled(120))
    assert process.returncode == 0, text
    rows = json.loads(table.read_text())["rows"]
    assert [(row["hosts"], row["size"]) for row in rows] == [
        (hosts, size) for hosts in (2, 3) for size in (4, 256, 16384, 1048576)
    ]
    assert not any(row["wrong"] for row in rows)
    assert not namespaces(process.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_benchmark_removes_its_namespaces(number):
    process = start("--hosts", "2", "-e", "64M", "-n", "100000")
    until = time.monotonic() + scaled(60)
    while len(namespaces(process.pid)) < 3 and time.monotonic() < until:
        assert process.poll() is None, process.communicate()[0]
    process.send_signal(number)
    text, _ = process.communicate(timeout=scaled(60))
    assert process.returncode == 130, text
    assert not namespaces(process.pid)
