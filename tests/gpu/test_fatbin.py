"""Kernels compiled by nvcc (``make kernels``), which are used where NVRTC is missing.

nvcc comes from PyPI (``requirements/cuda.txt``) and needs no GPU. The nvcc of the simulated GPUs is a script."""

import importlib.util
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import horoplug as hvd
from horoplug.common import dtypes
from tests.harness import ROOT, simulated_gpu
from tests.harness.kernels import kernel_names
from tests.harness.limits import scaled
from tests.harness.support import Pool, environment

SCRIPT = ROOT / "scripts" / "kernels.py"
HEADER = 96  # bytes


def compile_kernels(out, *options, path, **variables):
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *options],
        env={"PATH": f"{path}:/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=scaled(280),
    )


def kernels_line(env):
    """The line about the kernel file in ``--check-build --verbose``."""
    done = subprocess.run(
        [sys.executable, "-m", "horoplug.runner", "--check-build", "--verbose"],
        env=environment() | env,
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    (line,) = [line.strip() for line in done.stdout.splitlines() if "] Kernels" in line]
    return line


@pytest.fixture(scope="module")
def without_nvrtc(tmp_path_factory):
    """A folder for PYTHONPATH that hides the installed wheels."""
    folder = tmp_path_factory.mktemp("hiding")
    (folder / "nvidia").mkdir()
    (folder / "nvidia" / "__init__.py").touch()
    return f"{folder}:{ROOT}"


@pytest.mark.timeout(300)
def test_fatbin_has_every_kernel(tmp_path, without_nvrtc):
    """nvcc compiles the source without a message, and the file contains every kernel. One architecture is enough."""
    places = importlib.util.find_spec("nvidia").submodule_search_locations
    found = [path.parent for place in places for path in Path(place).glob("*/bin/nvcc")]
    if not found:
        pytest.fail("nvcc is not installed: run make .venv/.cuda", pytrace=False)
    out = tmp_path / "kernels.fatbin"
    # Optimising takes more than half of the time. Multiplications and additions are still contracted, if allowed.
    flags = {"NVCC_APPEND_FLAGS": "--no-compress -Xcicc -O1 -Xptxas -O1"}
    done = compile_kernels(out, "--archs", "75", path=found[0], **flags)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    code = out.read_bytes()[HEADER:]
    names = kernel_names()
    # Complex numbers have no minimum and no maximum.
    reductions = sum(2 if name.startswith("complex") else 4 for name in dtypes.NAMES)
    assert len(names) == len(set(names)) == 34 + reductions
    for name in names:
        assert b".text." + name.encode() + b"\0" in code, name
        assert b".entry " + name.encode() + b"(" in code, name
    assert b"fma.rn.f" not in code
    line = kernels_line({"PYTHONPATH": without_nvrtc, "HOROPLUG_KERNELS": str(out)})
    assert line == f"[X] Kernels of nvcc 13.1: sm_75, PTX ({out})"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Path of a kernel file for simulated GPUs; the file ``asked`` beside it has the arguments of their nvcc."""
    folder = tmp_path_factory.mktemp("nvcc")
    write_nvcc(folder)
    done = compile_kernels(folder / "kernels.fatbin", path=folder)
    assert done.returncode == 0, done.stderr
    return folder / "kernels.fatbin"


def write_nvcc(folder, release="12.4", archs=(50, 70, 75, 80, 86, 87, 89, 90, 91)):
    lines = "\\n".join(f"sm_{arch}" for arch in archs)
    (folder / "nvcc").write_text(f"""#!/bin/sh
case "$*" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.99"; exit ;;
  --list-gpu-code) printf "{lines}\\nsm_90a\\n"; exit ;;
esac
echo "$@" >> {folder}/asked
while [ "$1" != -o ]; do shift; done
printf "simulated kernel: \\0" > "$2"
""")
    (folder / "nvcc").chmod(0o755)


def test_nvcc_options_and_architectures(simulated):
    asked = (simulated.parent / "asked").read_text()
    for option in ("-fatbin --std=c++17 --fmad=false ", "code=[sm_70,compute_70]", "code=sm_90 "):
        assert option in asked
    assert re.findall(r"code=sm_(\d+)", asked) == ["75", "80", "86", "89", "90"]


@pytest.mark.parametrize(
    ("release", "archs", "options", "message"),
    [
        ("11.8", (75,), [], "is too old: CUDA 12.0 or newer is needed"),
        ("12.4", (75,), ["--archs", "75,90"], "does not compile for sm_90"),
        ("12.4", (50, 52), [], "compiles for none of (70, 75"),
    ],
)
def test_unsuitable_compilers_are_refused(tmp_path, release, archs, options, message):
    write_nvcc(tmp_path, release, archs)
    done = compile_kernels(tmp_path / "out", *options, path=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_missing_compiler_is_an_error(tmp_path):
    done = compile_kernels(tmp_path / "out", path=tmp_path, CUDA_HOME=str(tmp_path))
    assert done.stderr == "nvcc not found: put it into PATH, or set CUDA_HOME to CUDA's folder\n"


def test_failing_compiler_is_an_error(tmp_path):
    write_nvcc(tmp_path)
    with (tmp_path / "nvcc").open("a") as script:
        script.write("echo no >&2; exit 2\n")
    out = tmp_path / "out"
    out.write_text("before")
    done = compile_kernels(out, path=tmp_path)
    assert done.stderr == "no\nnvcc cannot compile the kernels: see its messages above\n"
    assert out.read_text() == "before"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A function that starts jobs of two ranks with simulated GPUs and without NVRTC."""
    folder = tmp_path_factory.mktemp("gpus")
    pool = Pool(variables=simulated_gpu.environment(folder, gpu_count=2, nvrtc_version=11080))
    yield lambda kernels: pool.ranks(2, env={"HOROPLUG_KERNELS": str(kernels)})
    pool.close()


def check_operations():
    device = simulated_gpu.Device(hvd.local_rank())
    before = device.count("scale_float32")
    mine = [np.arange(n, dtype=np.float32) + hvd.rank() for n in (5, 300)]
    for op in hvd.Average, hvd.Adasum:
        expected = hvd.grouped_allreduce(mine, op=op)
        found = hvd.grouped_allreduce([device.array(each) for each in mine], op=op)
        for array, wanted in zip(found, expected, strict=True):
            result = simulated_gpu.Array(device, (0,), array.dtype)
            result.address, result.shape = array.address, array.shape
            result.nbytes, result.stream = wanted.nbytes, array.stream
            np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-6)
    return device.count("scale_float32") - before


def test_job_without_nvrtc_uses_compiled_kernels(job, simulated):
    with job(simulated) as ranks:
        assert min(ranks.run(check_operations)) > 0


def test_simulated_gpu_loads_every_compiled_kernel(simulated, tmp_path):
    """tests/gpu/device does the same on a GPU."""
    done = subprocess.run(
        [
            str(ROOT / "build" / "release" / "bin" / "gpu_device_test"),
            "--test-case=*on a real GPU*",
        ],
        env=environment()
        | simulated_gpu.environment(tmp_path)
        | {"HOROPLUG_TEST_GPU": "1", "HOROPLUG_TEST_KERNELS": str(simulated)},
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def check_refused():
    device = simulated_gpu.Device(hvd.local_rank())
    try:
        hvd.allreduce(device.array(np.ones(3, np.float32)), op=hvd.Average)
    except (hvd.HorovodInternalError, ValueError) as error:
        return str(error)


def damage(content, how):
    if how == "is damaged":
        return content[:-3] + b"!" + content[-2:]
    if how == "was made from another version of the kernels":
        return content[:8] + struct.pack("<Q", 1) + content[16:]
    if how == "is no file of kernels":
        return b"\x50\xed\x55\xba" + content[4:]
    if how == "too new for the driver, which is for CUDA 12.4":
        return content[:32] + struct.pack("<i", 13010) + content[36:]
    if how == "has none for the GPU (sm_90)":  # only for sm_80
        return content[:36] + struct.pack("<iii", 0, 80, 0) + bytes(48) + content[96:]
    return content


@pytest.mark.parametrize(
    "how",
    [
        "is damaged",
        "was made from another version of the kernels",
        "is no file of kernels",
        "too new for the driver, which is for CUDA 12.4",
        "has none for the GPU (sm_90)",
        "anybody can write it",
        "cannot be read",
    ],
)
def test_invalid_kernel_files_are_refused(job, simulated, tmp_path, how):
    kernels = tmp_path / "kernels.fatbin"
    if how != "cannot be read":
        kernels.write_bytes(damage(simulated.read_bytes(), how))
        kernels.chmod(0o666 if how == "anybody can write it" else 0o644)
    with job(kernels) as ranks:
        for message in ranks.run(check_refused):
            assert "\n" not in message
            assert str(kernels) in message
            assert how in message
            assert "install nvidia-cuda-nvrtc of the driver's CUDA version, or " in message


def test_check_build_reports_the_kernel_file(simulated, tmp_path):
    devices = simulated_gpu.environment(tmp_path)
    named = {"HOROPLUG_KERNELS": str(simulated)}
    assert kernels_line(devices | named) == "[X] Kernels of NVRTC (compiled when first used)"
    missing = devices | {"SIMULATED_NVRTC_VERSION": "11080"}
    line = kernels_line(missing | named)
    archs = "sm_70, sm_75, sm_80, sm_86, sm_89, sm_90"
    assert line == f"[X] Kernels of nvcc 12.4: {archs}, PTX ({simulated})"
    line = kernels_line(missing | {"HOROPLUG_KERNELS": "/nonexistent/kernels.fatbin"})
    assert line.startswith("[ ] Kernels: ")
    assert "version 11.8 is too old: 12.0 is needed" in line
    assert "; and /nonexistent/kernels.fatbin: cannot be read; install nvidia-cuda-nvrtc" in line
    assert line.endswith("or compile the kernels with nvcc: make kernels")
