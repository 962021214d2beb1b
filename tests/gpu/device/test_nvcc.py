"""Every kernel gives the same bits if nvcc has compiled it, for the GPU or as PTX."""

import os
import re
import subprocess
import sys

import pytest

from horoplug.runner.diagnosis import gpu
from tests.harness import ROOT
from tests.harness.limits import scaled


@pytest.mark.timeout(900)
@pytest.mark.parametrize("code", ["of this GPU", "PTX"])
def test_nvcc_kernels_match_cpu_kernels(tmp_path, code):
    driver = gpu.lines()[0]
    found = re.search(r"\(sm_(\d+),", driver)
    if "[X]" not in driver or not found:
        pytest.skip(driver.strip())
    out = tmp_path / "kernels.fatbin"
    archs = found[1] if code == "of this GPU" else "75"
    command = [sys.executable, str(ROOT / "scripts" / "kernels.py"), "--archs", archs]
    made = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    if "nvcc not found" in made.stderr:
        pytest.skip("nvcc is not installed")
    assert made.returncode == 0, made.stderr
    done = subprocess.run(
        [str(ROOT / "build" / "release" / "bin" / "gpu_device_test"), "--no-colors"],
        env={**os.environ, "HOROPLUG_TEST_GPU": "1", "HOROPLUG_TEST_KERNELS": str(out)},
        capture_output=True,
        text=True,
        timeout=scaled(500),
    )
    assert done.returncode == 0, done.stdout + done.stderr
