"""Builds the core's tests for all architectures with the compiler of the wheels: build/wheels/ARCHITECTURE-tests.

tests/wheels runs them in other user lands."""

import platform
import shutil
import sys
from pathlib import Path

from build import ARCHITECTURES, ROOT, WORK, compiler, run, tools

DOCTEST = Path("/usr/include/doctest/doctest.h")


def main() -> None:
    if not DOCTEST.exists():
        sys.exit(f"{DOCTEST} not found: install doctest-dev")
    # In a folder without the headers of this machine's glibc.
    headers = WORK / "include"
    (headers / "doctest").mkdir(parents=True, exist_ok=True)
    shutil.copy(DOCTEST, headers / "doctest")
    for architecture in ARCHITECTURES:
        folder = WORK / f"{architecture}-tests"
        options = ["-G", "Ninja", "-DHOROPLUG_TESTS=ON", f"-DDOCTEST_INCLUDE={headers}"]
        options += [f"-DHOROPLUG_EMULATED={architecture != platform.machine()}"]
        run("cmake", "-S", ROOT, "-B", folder, *options, *compiler(architecture), **tools())
        run("cmake", "--build", folder, **tools())


if __name__ == "__main__":
    main()
