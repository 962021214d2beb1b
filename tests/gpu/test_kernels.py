"""The GPU kernels compile, without a warning and without spilling registers, for every architecture.

NVRTC comes from PyPI (``requirements/cuda.txt``) and needs no GPU. What the kernels compute is tested on the host
(``csrc/tests/device/gpu_kernels_test.cc``) and, where there is a GPU, by ``tests/gpu/device``."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from horoplug.common import dtypes, gpu
from tests.harness import ROOT
from tests.harness.kernels import kernel_names
from tests.harness.limits import scaled
from tests.harness.nvrtc import Nvrtc

# As in csrc/device/cuda/jit/compile.cc.
OPTIONS = ["--std=c++17", "--fmad=false"]
# One kernel of each kind; of the reductions, those that need the most registers.
SAMPLES = {
    "copy_32": "HP_MOVE(copy_32, Raw32, Raw32)",
    "cast_float32_float16": "HP_MOVE(cast_float32_float16, Float32, Float16)",
    "reduce_sum_bfloat16": "HP_REDUCE(reduce_sum_bfloat16, BFloat16, Sum)",
    "dots_float32": "HP_DOTS(dots_float32, Float32)",
}
USE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers", re.S
)


@pytest.fixture(scope="module")
def library():
    """Path of NVRTC."""
    for path in gpu.libraries():
        if "libnvrtc" in path:
            return Path(path)
    pytest.fail("NVRTC is not installed: run make .venv/.cuda", pytrace=False)


@pytest.fixture(scope="module")
def nvrtc(library):
    return Nvrtc(library)


def compile_quietly(nvrtc, *options):
    """The compiled code, and for each kernel the bytes of stack and the number of registers. Checks that NVRTC does not
    warn."""
    code, log = nvrtc.compile([*OPTIONS, "--ptxas-options=-v", *options])
    assert "warning" not in log.lower(), log
    return code, {name: (int(stack), int(registers)) for name, stack, registers in USE.findall(log)}


@pytest.mark.timeout(300)
def test_every_kernel_compiles_with_nvrtc(nvrtc):
    _, used = compile_quietly(nvrtc, "--gpu-architecture=sm_90")
    assert set(used) == set(kernel_names())
    reductions = [name for name in used if name.startswith("reduce_")]
    # Complex numbers have no minimum and no maximum.
    assert len(reductions) == sum(2 if name.startswith("complex") else 4 for name in dtypes.NAMES)
    for name, (stack, registers) in used.items():
        print(f"{name:24} {registers:3} registers, {stack} bytes of stack")
        assert stack <= 16, name
        # At least three blocks of 256 threads fit on a multiprocessor, which has 65536 registers.
        assert registers <= 85, name


@pytest.mark.timeout(300)
def test_kernels_compile_for_every_architecture(nvrtc):
    major, minor = nvrtc.version()
    archs = nvrtc.archs()
    assert {75, 80, 90, 100, 120} <= set(archs), f"NVRTC {major}.{minor} is too old for this test"
    for arch in archs:
        for name, only in SAMPLES.items() if arch in (75, 120) else [*SAMPLES.items()][1:2]:
            code, used = compile_quietly(
                nvrtc, f"--gpu-architecture=sm_{arch}", f"-DHP_ONLY={only}"
            )
            assert code.startswith(b"\x7fELF")
            stack, _ = used[name]
            assert stack <= 16, (arch, name)


def ptx(nvrtc, name):
    code, _ = nvrtc.compile(
        [*OPTIONS, "--gpu-architecture=compute_75", f"-DHP_ONLY={SAMPLES[name]}"]
    )
    return code.decode()


@pytest.mark.parametrize("name", ["copy_32", "cast_float32_float16", "reduce_sum_bfloat16"])
def test_memory_is_accessed_in_vectors(nvrtc, name):
    text = ptx(nvrtc, name)
    # Four packets are in flight: four loads in a row, or eight of the wider type.
    assert len(re.findall(r"\bld(?:\.global)?\.v4\.[uf]32", text)) >= 4
    assert len(re.findall(r"\bst(?:\.global)?\.v4\.[uf]32", text)) >= 4


def test_kernels_have_no_fused_multiply_add(nvrtc):
    """Products are rounded before the addition, as on the CPU."""
    assert not re.findall(r"\bfma\.rn\.f\d+", ptx(nvrtc, "dots_float32"))


@pytest.mark.timeout(120)
def test_core_compiles_kernels_itself(library):
    binary = ROOT / "build" / "release" / "bin" / "gpu_compile_test"
    if not binary.exists():
        pytest.fail(f"{binary} is not built: run make cpp", pytrace=False)
    done = subprocess.run(
        [str(binary), "--no-colors", "--test-case=a real NVRTC*"],
        env={**os.environ, "HOROPLUG_TEST_NVRTC": str(library)},
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert done.returncode == 0, done.stdout
    assert "0 failed" in done.stdout
    assert "assertions: 0" not in done.stdout
