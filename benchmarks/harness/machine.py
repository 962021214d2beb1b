"""The machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("numpy", "torch", "mpi4py", "horovod")


ROUND_TRIP = Path(__file__).resolve().parents[2] / "build/release/bin/core_round_trip_bench"


def describe() -> dict[str, str]:
    """Properties of the machine and versions of installed packages, by label."""
    import horoplug
    from horoplug import _native

    described = {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": _memory(),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "horoplug": f"{horoplug.__version__} ({_native.cpu_kernels()} kernels)",
    }
    for package in PACKAGES:
        try:
            described[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return described


def load() -> float:
    """The load average of the last minute, which includes the benchmark's own processes."""
    return os.getloadavg()[0]


def round_trip() -> float | None:
    """How many nanoseconds a cache line takes from one core to another and back: several times as many while a virtual
    machine has cores that share no cache. Takes a few milliseconds. None if the program is not built (make
    cpp-release) or there is one core only."""
    try:
        return float(
            subprocess.run([ROUND_TRIP], capture_output=True, check=True, timeout=10).stdout
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _memory() -> str:
    kib = _field("/proc/meminfo", "MemTotal").split()
    return f"{int(kib[0]) / 2**20:.1f} GiB" if kib else "?"


def _field(path: str, name: str) -> str:
    """The value of the first line ``name : value`` of a file; empty without file or line."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
