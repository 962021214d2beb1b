"""Checkouts whose packages are compared: what identifies them, and the build of another commit."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

MEASURED: Final = ("CMakeLists.txt", "benchmarks", "csrc", "horoplug", "pyproject.toml", "setup.py")
"""The files and folders from which the package is built, and the benchmarks. Changes of others change no result."""
BUILT: Final = f".built-{sys.implementation.cache_tag}"


class Checkout(NamedTuple):
    folder: Path
    name: str
    """The start of the commit's hash. If there are changes that are not committed, ``-dirty-`` and a hash of them."""


def identified(folder: Path) -> Checkout:
    """The checkout in a folder, with its changes. Errors: SystemExit if it is no checkout."""
    folder = folder.resolve()
    if Path(_git(folder, "rev-parse", "--show-toplevel").decode().rstrip("\n")) != folder:
        raise SystemExit(f"{folder} is not the top folder of a git checkout")
    name = _short(_git(folder, "rev-parse", "HEAD").decode())
    changes = _git(folder, "diff", "--binary", "HEAD", "--", *MEASURED)
    digest = hashlib.sha256(changes)
    new = _git(folder, "ls-files", "-z", "--others", "--exclude-standard", "--", *MEASURED)
    for file in filter(None, new.split(b"\0")):
        digest.update(b"\0" + file + b"\0" + (folder / os.fsdecode(file)).read_bytes())
    return Checkout(folder, f"{name}-dirty-{digest.hexdigest()[:8]}" if changes or new else name)


def built(repository: Path, commit: str, parent: Path) -> Checkout:
    """The files of a commit, with its package built in place, in a folder of ``parent``; built by this Python, unless
    that was done before. Errors: SystemExit if there is no such commit, or if it cannot be built."""
    sha = _git(repository, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    name = _short(sha.decode())
    folder = parent / name
    if (folder / BUILT).exists():
        return Checkout(folder, name)
    print(f"building {name} in {folder}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    files = _git(repository, "archive", sha.decode().strip())
    subprocess.run(["tar", "-x", "-C", str(folder)], input=files, check=True)
    environment = {**os.environ, "CCACHE_BASEDIR": str(folder.resolve())}
    for variable in ("PYTHONPATH", "HOROPLUG_BUILD_DIR"):  # of this checkout
        environment.pop(variable, None)
    if ccache := shutil.which("ccache"):
        environment.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", ccache)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    if subprocess.run(command, cwd=folder, env=environment, stdout=sys.stderr).returncode:
        raise SystemExit(f"{name} cannot be built in {folder}")
    (folder / BUILT).touch()
    return Checkout(folder, name)


def _short(sha: str) -> str:
    return sha.strip()[:12]


def _git(folder: Path, *words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True)
    if done.returncode:
        raise SystemExit(f"git {words[0]}: {done.stderr.decode().strip()}")
    return done.stdout
