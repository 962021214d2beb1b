"""The report of ``horovodrun --check-build --verbose`` on CUDA libraries that are present, too old, broken or missing.

The libraries are those of ``csrc/tests/stubs``, which ``make cpp`` builds."""

import os
import shutil
import subprocess
import sys

import pytest

from horoplug.common import gpu
from tests.harness import ROOT
from tests.harness.limits import scaled

STUBS = ROOT / "build" / "release" / "stubs"


def check_build(*flags, env):
    done = subprocess.run(
        [sys.executable, "-m", "horoplug.runner", "--check-build", *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def gpus(env):
    """The lines of the report about the driver, NVRTC and NCCL."""
    lines = check_build("--verbose", env=env).splitlines()
    at = lines.index("GPUs:")
    driver, nvrtc, nccl = lines[at + 1 : at + 4]
    return driver.strip(), nvrtc.strip(), nccl.strip()


@pytest.fixture
def wheels(tmp_path):
    """A function that puts stub libraries where PyPI's wheels have theirs, and returns the environment to find them."""

    def install(**files):
        for place, (kind, name) in files.items():
            folder = tmp_path / "nvidia" / place / "lib"
            folder.mkdir(parents=True)
            if (found := STUBS / kind / name).exists():
                shutil.copy(found, folder / name)
            else:
                pytest.fail(f"{found} is not built: run make cpp", pytrace=False)
        return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}

    return install


@pytest.mark.short
def test_libraries_of_wheels_are_found(wheels):
    env = wheels(
        cuda_nvrtc=("good", "libnvrtc.so.12"),
        nccl=("good", "libnccl.so.2"),
    )
    driver, nvrtc, nccl = gpus({**env, "LD_LIBRARY_PATH": str(STUBS / "good")})
    assert driver.startswith("[X] CUDA driver 12.4: Stub (sm_90, 80 GiB) (")
    assert nvrtc.startswith("[X] NVRTC 12.4 (")
    assert "/cuda_nvrtc/lib/libnvrtc.so.12" in nvrtc
    assert nccl.startswith("[X] NCCL 2.23.4 (")
    assert "/nccl/lib/libnccl.so.2" in nccl


def test_wheels_are_found_in_every_folder_of_the_namespace(wheels, tmp_path, monkeypatch):
    wheels(cu13=("new", "libnvrtc.so.13"), nccl=("good", "libnccl.so.2"))
    other = tmp_path / "other" / "nvidia" / "cuda_nvrtc" / "lib"
    other.mkdir(parents=True)
    shutil.copy(STUBS / "good" / "libnvrtc.so.12", other)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "other"), *sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    found = [path for path in gpu.libraries() if path.startswith(str(tmp_path))]
    assert [path.removeprefix(f"{tmp_path}/") for path in found] == [
        "other/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia/nccl/lib/libnccl.so.2",
    ]


def test_too_old_libraries_are_refused(wheels, tmp_path):
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "__init__.py").touch()  # a package hides the wheels that are installed
    env = wheels(cuda_nvrtc=("old", "libnvrtc.so.12"), nccl=("old", "libnccl.so.2"))
    driver, nvrtc, nccl = gpus({**env, "LD_LIBRARY_PATH": str(STUBS / "old")})
    assert driver.startswith("[ ] CUDA driver: ")
    assert "11.4, which is too old" in driver
    assert "version 11.8 is too old" in nvrtc
    assert "version 2.8.4 is too old" in nccl


@pytest.mark.parametrize("damage", ["truncated", "text"])
def test_damaged_libraries_are_reported(wheels, tmp_path, damage):
    env = wheels(nccl=("good", "libnccl.so.2"))
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    content = library.read_bytes()
    library.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"not ELF\n")
    nccl = gpus(env)[2]
    assert ("is truncated" if damage == "truncated" else "is no 64-bit library") in nccl


def test_check_build_without_verbose_omits_gpus(wheels):
    env = wheels(nccl=("good", "libnccl.so.2"))
    assert "GPUs:" not in check_build(env=env)
