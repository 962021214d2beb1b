"""Builds the core and its Python module with CMake; everything else about the package is in pyproject.toml.

All libraries come from one CMake build directory, ``build/release``, which ``make`` and CMake users share: building
for another interpreter, or once more, does not compile the core again. What a directory was configured with stays
(options such as ``HOROPLUG_WERROR``); only what belongs to the interpreter is set anew each time, and what the
environment variable ``CMAKE_ARGS`` holds: options for CMake, separated by spaces.
"""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def check_platform() -> None:
    """Say in one line why horoplug cannot be installed here, instead of by a compiler's errors."""
    if sys.platform != "linux":
        instead = "WSL 2 or a Linux container" if sys.platform == "win32" else "a Linux container"
        raise SystemExit(f"horoplug runs on Linux only, and this is {sys.platform}: use {instead}")
    if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
        raise SystemExit(
            "horoplug needs glibc, and this system has musl: use an image of Debian, Ubuntu, Fedora or a relative"
        )


def tool(name: str, folder_attribute: str) -> str:
    """Path of a build tool: the PyPI package this interpreter sees, else what the system has."""
    try:
        folder = getattr(importlib.import_module(name), folder_attribute)
    except (ImportError, AttributeError):
        folder = None
    found = shutil.which(name, path=folder) or shutil.which(name)
    if not found:
        raise SystemExit(f"{name} not found: pip install {name}")
    return found


class Build(build):
    """Start from an empty folder: setuptools would pack modules that have since been deleted."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildExt(build_ext):
    """Runs CMake, installs libhoroplug.so and what is built on it side by side, and writes the stubs of the operations.
    Errors and progress are shown."""

    def run(self) -> None:
        folder = Path(os.environ.get("HOROPLUG_BUILD_DIR", ROOT / "build" / "release"))
        package = (ROOT if self.inplace else Path(self.build_lib).resolve()) / "horoplug"
        cmake = tool("cmake", "CMAKE_BIN_DIR")
        configure = [cmake, "-S", str(ROOT), "-B", str(folder)]
        if not (folder / "CMakeCache.txt").exists():
            configure += ["-G", "Ninja", "-DHOROPLUG_TESTS=OFF"]
        configure += [
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja', 'BIN_DIR')}",
            "-DHOROPLUG_PYTHON=ON",
            f"-DHOROPLUG_PYTHON_EXECUTABLE={sys.executable}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(
            [
                cmake,
                "--build",
                str(folder),
                "--target",
                "horoplug",
                "_native",
                "horoplug_tensorflow",
                "horoplug_jax",
            ],
            check=True,
        )
        subprocess.run(
            [cmake, "--install", str(folder), "--prefix", str(package), "--component", "python"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        subprocess.run(
            [sys.executable, "-m", "horoplug.common.stubs", str(package)], cwd=ROOT, check=True
        )

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib, "horoplug")
        return [str(path) for each in ("*.so", "*/operations.pyi") for path in package.glob(each)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


check_platform()
# The extension has no sources of its own; naming it makes the wheel one for this platform and interpreter.
setup(
    ext_modules=[Extension("horoplug._native", sources=[])],
    cmdclass={"build": Build, "build_ext": BuildExt},
)
