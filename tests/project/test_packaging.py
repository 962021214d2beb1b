"""The wheel: its contents, the dependencies and exports of its libraries, and its use without a compiler."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from horoplug import _native
from horoplug.common.stubs import FRAMEWORKS
from tests.harness import ROOT
from tests.harness.limits import scaled

STUBS = [f"horoplug/{framework}/operations.pyi" for framework in FRAMEWORKS]
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M).group(1)
# glibc consists of libc, libm, libdl, libpthread and the loader; its version determines which are named.
ALLOWED = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
    "libstdc++.so.6",
    "libgcc_s.so.1",
}


def run(command, **options):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=scaled(900), **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source, folder, *options, **more):
    """Build the wheel of a source tree or archive."""
    run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, *options, source],
        **more,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built with this environment's tools from the objects that make has compiled."""
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "--no-build-isolation")


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", code], cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.mark.timeout(600)
def test_source_archive_has_nothing_that_the_build_writes(sdist):
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert not [name for name in names if name.endswith((".so", "operations.pyi", ".pyc"))]


def libraries(folder):
    found = sorted((folder / "horoplug").glob("*.so"))
    names = [path.name.split(".")[0] for path in found]
    assert names == ["_native", "libhoroplug", "libhoroplug_jax", "libhoroplug_tensorflow"]
    return found


@pytest.mark.short
def test_version_is_the_same_everywhere():
    assert VERSION == _native.version() == metadata.version("horoplug")


@pytest.mark.timeout(600)
def test_wheel_contents(unpacked):
    packed = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    modules = {
        path.relative_to(ROOT)
        for kind in ("*.py", "*.pyi", "py.typed")
        for path in (ROOT / "horoplug").rglob(kind)
    }
    assert modules <= packed
    for stub in STUBS:
        assert (unpacked / stub).read_bytes() == (ROOT / stub).read_bytes()
    assert Path("horoplug/py.typed") in packed  # without it, type checkers ignore all annotations
    assert {path.parts[0] for path in packed} == {"horoplug", f"horoplug-{VERSION}.dist-info"}
    scripts = (unpacked / f"horoplug-{VERSION}.dist-info" / "entry_points.txt").read_text()
    for name in ("horovodrun", "horoplugrun"):
        assert f"{name} = horoplug.runner.launch:main" in scripts


@pytest.mark.timeout(600)
def test_libraries_need_only_the_language_runtime(unpacked):
    native, core, jax, tensorflow = libraries(unpacked)
    for library in native, core, jax, tensorflow:
        needed = set(re.findall(r"NEEDED.*\[(.+)\]", run(["readelf", "-dW", library])))
        assert needed - (set() if library == core else {core.name}) <= ALLOWED
    for library in native, jax, tensorflow:
        assert "[$ORIGIN]" in run(["readelf", "-dW", library])


def exported(library):
    names = set()
    for line in run(["readelf", "-W", "--dyn-syms", library]).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0][:-1].isdigit() and fields[6] != "UND":
            names.add(fields[7].split("@")[0])
    return names


@pytest.mark.timeout(600)
def test_only_the_c_abi_is_exported(unpacked):
    native, core, jax, tensorflow = libraries(unpacked)
    header = (ROOT / "csrc" / "include" / "horoplug" / "horoplug.h").read_text()
    declared = set(re.findall(r"^HP_API .*?\b(hp_\w+)\(", header, re.M))
    assert "hp_submit" in declared
    assert exported(core) == declared
    assert exported(native) == {"PyInit__native"}
    functions = "await close copy_results failure open row_counts run use"
    assert exported(jax) == {f"horoplug_jax_{name}" for name in functions.split()}
    assert exported(tensorflow) == {
        f"horoplug_tensorflow_{name}" for name in ("asynchronous", "problem", "use", "xla")
    }


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin folder of a new virtual environment with the wheel, and environment variables without a compiler."""
    folder = tmp_path_factory.mktemp("venv")
    run([sys.executable, "-m", "venv", folder])
    bare = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOROVOD_", "HOROPLUG_", "PYTHON"))
    }
    bare |= {"PATH": str(folder / "bin"), "CC": "/bin/false", "CXX": "/bin/false"}
    run([folder / "bin" / "pip", "install", "-q", "--only-binary", ":all:", wheel], env=bare)
    return folder / "bin", bare


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestInstalled:
    def test_wheel_installs_only_its_dependencies(self, installed):
        bin_folder, env = installed
        listed = run([bin_folder / "pip", "list", "--format=freeze"], env=env)
        names = {line.split("==")[0].lower() for line in listed.split()}
        ours = {"horoplug", "cloudpickle", "numpy", "packaging", "pyyaml"}
        assert names - {"pip", "setuptools", "wheel"} == ours

    def test_installed_wheel_runs_on_one_rank(self, installed, tmp_path):
        bin_folder, env = installed
        code = (
            "import numpy as np, horoplug as hvd; hvd.init(); "
            "x = hvd.allreduce(np.arange(5, dtype=np.float32), op=hvd.Sum); "
            "assert x.tolist() == [0, 1, 2, 3, 4] and hvd.size() == 1; hvd.shutdown(); "
            "print(hvd.__version__, hvd.__file__)"
        )
        version, path = run([bin_folder / "python", "-c", code], env=env, cwd=tmp_path).split()
        assert version == VERSION
        assert Path(path).is_relative_to(bin_folder.parent)

    @pytest.mark.parametrize("script", ["horovodrun", "horoplugrun"])
    def test_installed_wheel_has_the_launcher(self, installed, tmp_path, script):
        bin_folder, env = installed
        assert VERSION in run([bin_folder / script, "--version"], env=env, cwd=tmp_path)
        assert "numpy" in run([bin_folder / script, "--check-build"], env=env, cwd=tmp_path).lower()


def reused_objects():
    """Variables with which a build takes the objects of the checkout's release build from ccache. Objects of other
    source text or options are compiled. No variables if the release build did not use ccache."""
    cache = ROOT / "build" / "release" / "CMakeCache.txt"
    options = re.findall(
        r"^(HOROPLUG_WERROR|CMAKE_CXX_COMPILER_LAUNCHER):.*?=(.*)$", cache.read_text(), re.M
    )
    settings = dict(options)
    if not settings.get("CMAKE_CXX_COMPILER_LAUNCHER"):
        return {}
    return {
        "CCACHE_DIR": os.environ.get("CCACHE_DIR", str(ROOT / ".cache" / "ccache")),
        "CCACHE_NOHASHDIR": "1",
        # Of the new build, as the checkout's folder is of the release build: objects are the same but for it.
        "CCACHE_BASEDIR": os.environ["TMPDIR"],
        "CMAKE_CXX_COMPILER_LAUNCHER": settings["CMAKE_CXX_COMPILER_LAUNCHER"],
        "CMAKE_ARGS": f"-DHOROPLUG_WERROR={settings['HOROPLUG_WERROR']}",
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_source_archive_builds_with_a_compiler_and_nothing_else(sdist, tmp_path):
    """Like ``pip install horoplug`` without a wheel: pip alone provides CMake and the other build tools."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("c++", "g++", "cc", "gcc", "as", "ld", "ar", "ranlib", "uname", "sh"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    folder = tmp_path / "wheel"
    folder.mkdir()
    env = {**os.environ, "PATH": str(tools), **reused_objects()}
    wheel = build(sdist, folder, env=env, cwd=tmp_path)
    built = zipfile.ZipFile(wheel)
    assert "horoplug/libhoroplug.so" in built.namelist()
    for stub in STUBS:
        assert built.read(stub) == (ROOT / stub).read_bytes()


@pytest.mark.short
def test_python_3_10_can_make_all_classes():
    """mypy checks for Python 3.10 all but this: a NamedTuple there has no further base class. make test-wheels imports
    all modules in each Python."""
    for file in (ROOT / "horoplug").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and len(node.bases) > 1:
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                assert "NamedTuple" not in bases, f"{file}:{node.lineno}"
