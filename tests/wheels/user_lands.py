"""The libraries of the wheels with those of an old Debian, and for aarch64 under an emulator. Not part of make test:
make test-wheels, which builds the core's tests like the wheels (build/wheels/ARCHITECTURE-tests)."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.harness import ROOT
from tests.harness.limits import scaled
from tests.harness.user_land import UserLand
from tests.harness.wheels import WHEELS, wheel

BUILD = ROOT / "build" / "wheels"
PYTHON = (3, 11)  # of Debian 12
PACKAGES = ("cloudpickle", "iniconfig", "numpy", "packaging", "pluggy", "psutil", "Pygments")
PACKAGES += ("pytest", "pytest-timeout", "PyYAML", "ml_dtypes")
# Of csrc/tests.
FOLDERS = ("base", "device", "transport", "controller", "trace", "collectives", "engine")
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a chroot"),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def old():
    """Debian 11, with glibc 2.31: the oldest one that Debian's servers have."""
    return UserLand("bullseye")


@pytest.fixture(scope="module")
def arm():
    return UserLand("bookworm", "arm64", packages=("python3", "python3-venv"))


def core_tests(user_land, architecture, folder):
    program = BUILD / f"{architecture}-tests" / "bin" / "horoplug_tests"
    files = f"--source-file=*tests/{folder}/*"
    return user_land.run(program, files, shared=(ROOT / "build",), timeout=3000)


@pytest.mark.parametrize("folder", FOLDERS)
def test_core_passes_its_tests_in_debian_11(old, folder):
    assert "glibc 2.31" in old.run("getconf", "GNU_LIBC_VERSION").stdout
    assert " 0 failed" in core_tests(old, "x86_64", folder).stdout


@pytest.mark.parametrize(
    "name", ["libhoroplug.so", "libhoroplug_jax.so", "libhoroplug_tensorflow.so"]
)
def test_library_loads_in_debian_11(old, name):
    """Debian 11's own Python is older than those for which there are wheels."""
    shutil.unpack_archive(next(WHEELS.glob("*_x86_64.whl")), old.root / "opt" / "wheel", "zip")
    variables = (f"LD_PRELOAD=/opt/wheel/horoplug/{name}", "LD_BIND_NOW=1")
    done = old.run("env", *variables, "cat", "/proc/self/maps")
    assert done.stderr == ""
    assert name in done.stdout


@pytest.mark.parametrize("folder", FOLDERS)
def test_core_passes_its_tests_on_aarch64(arm, folder):
    assert arm.run("uname", "-m").stdout == "aarch64\n"
    assert " 0 failed" in core_tests(arm, "aarch64", folder).stdout


@pytest.fixture(scope="module")
def arm_python(arm):
    """The Python of an environment with the wheel for aarch64, in the user land for that architecture."""
    folder = arm.root / "opt" / "packages"
    shutil.rmtree(folder, ignore_errors=True)
    file = wheel(f"cp{PYTHON[0]}{PYTHON[1]}", "aarch64")
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)]
    platforms += ["--platform=manylinux2014_aarch64"]
    version = ["--python-version", f"{PYTHON[0]}.{PYTHON[1]}", "--only-binary=:all:"]
    pinned = (ROOT / "requirements" / "test.txt").read_text().splitlines()
    wanted = [line for line in pinned if line.split("==")[0] in PACKAGES]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
    subprocess.run([*command, *platforms, *version, *wanted, file], check=True, timeout=scaled(600))
    for entry in ("tests", "conftest.py", "pyproject.toml"):
        source, target = ROOT / entry, arm.root / "opt" / "checkout" / entry
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)

    def run(*arguments, **options):
        variables = {"PYTHONPATH": "/opt/packages:/opt/checkout"}
        return arm.run("/usr/bin/python3", *arguments, **options, **variables)

    return run


def test_ranks_on_aarch64(arm_python):
    code = """
import numpy as np
import horoplug as hvd
from horoplug import _native

hvd.init()
print(_native.cpu_kernels(), hvd.allreduce(np.ones(3, np.float16), op=hvd.Sum).tolist())
"""
    done = arm_python("-m", "horoplug.runner", "-np", "2", "python3", "-c", code)
    assert done.stdout.count("[2.0, 2.0, 2.0]") == 2


@pytest.mark.parametrize(
    "file",
    ["test_numpy_ops.py", "test_dtypes.py", "test_rooted_operations.py", "test_numpy_kill.py"],
)
def test_numpy_api_on_aarch64(arm_python, file):
    options = ("-q", "-p", "no:cacheprovider", "-m", "not matrix", "--rootdir=/opt/checkout")
    arm_python("-m", "pytest", *options, f"/opt/checkout/tests/core/{file}", timeout=1800)
