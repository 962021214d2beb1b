"""Every kernel gives the same bits on the GPU as on the CPU, also under compute-sanitizer.

The tests in this folder are skipped, with a reason, on machines without a GPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from horoplug.common.gpu import libraries
from horoplug.runner.diagnosis import gpu
from tests.harness import ROOT
from tests.harness.limits import scaled


@pytest.fixture(scope="module")
def nvrtc():
    """Path of the NVRTC of a wheel; empty: the system's is used."""
    driver, compiler = gpu.lines()[:2]
    for line in (driver, compiler):
        if "[X]" not in line:
            pytest.skip(line.strip())
    return next((path for path in libraries() if "libnvrtc" in path), "")


SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", [None, "memcheck", "racecheck"])
def test_gpu_kernels_match_cpu_kernels(nvrtc, tool):
    """Every kernel, compiled by NVRTC for this GPU, gives the CPU's bits, and compute-sanitizer finds no error."""
    checked = [] if tool is None else [SANITIZER, "--tool", tool, "--error-exitcode", "9"]
    if checked and not Path(SANITIZER).exists():
        pytest.skip("compute-sanitizer is not installed")
    done = subprocess.run(
        [*checked, str(ROOT / "build" / "release" / "bin" / "gpu_device_test"), "--no-colors"],
        env={**os.environ, "HOROPLUG_TEST_GPU": "1", "HOROPLUG_TEST_NVRTC": nvrtc},
        capture_output=True,
        text=True,
        timeout=scaled(500),
    )
    assert done.returncode == 0, done.stdout + done.stderr
