"""Builds the wheels of all architectures and Pythons of this machine, and the source archive: build.py FOLDER

Compiles with ziglang, whose clang knows the symbols of each version of glibc, so that the wheels run on every Linux
with glibc 2.17 or newer (manylinux2014). The libraries without Python in them are compiled once for an architecture and
are the same bytes in all of its wheels. The Python that runs this needs requirements/wheels.txt."""

import gzip
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import sbom
import ziglang
from pythons import pythons

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheels"
GLIBC = "2.17"
ARCHITECTURES = ("x86_64", "aarch64")
# What a Python needs to build a wheel by setup.py. CMake and Ninja are programs, and are found on PATH.
PACKAGES = ("pybind11", "setuptools")


def run(*command: object, **variables: str) -> None:
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, env=os.environ | variables)


def environment(tag: str, program: str) -> Path:
    """The Python of a virtual environment that can build wheels for ``program``."""
    folder = WORK / "pythons" / tag
    if not (folder / ".installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(program, "-m", "venv", folder)
        packages = WORK / "packages.txt"
        packages.write_text(hashed(PACKAGES))
        run(folder / "bin" / "python", "-m", "pip", "install", "-q", "-r", packages)
        (folder / ".installed").touch()
    return folder / "bin" / "python"


def hashed(names: tuple[str, ...]) -> str:
    """The lines of requirements/wheels.txt for these packages."""
    text = (ROOT / "requirements" / "wheels.txt").read_text().replace("\\\n", "")
    return "".join(line + "\n" for line in text.splitlines() if line.split("==")[0] in names)


def compiler(architecture: str) -> list[str]:
    """CMake's options for the compiler of the wheels."""
    options = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "scripts" / "wheels" / "zig.cmake",
        "HOROPLUG_ZIG": Path(ziglang.__file__).parent / "zig",
        "HOROPLUG_ZIG_TARGET": f"{architecture}-linux-gnu.{GLIBC}",
        "HOROPLUG_ZIG_HEADERS": debian_headers(architecture),
    }
    return [f"-D{name}={value}" for name, value in options.items()]


def debian_headers(architecture: str) -> Path:
    """A folder to search last for headers. Python.h of Debian's Python includes a file of a folder that is named after
    the architecture. Its content depends on the size of a pointer and the byte order, which our architectures share."""
    folder = WORK / "headers" / architecture
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / f"{architecture}-linux-gnu"
    if not link.is_symlink():
        link.symlink_to(f"/usr/include/{platform.machine()}-linux-gnu")
    return folder


def tools() -> dict[str, str]:
    """The environment in which CMake and the compiler run."""
    return {
        "ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(WORK / "zig"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def build(python: Path, architecture: str, to: Path) -> Path:
    """The wheel as setup.py makes it."""
    shutil.rmtree(to, ignore_errors=True)
    run(
        *(python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", to, ROOT),
        HOROPLUG_BUILD_DIR=str(WORK / architecture),
        CMAKE_ARGS=" ".join(compiler(architecture)),
        **tools(),
    )
    (wheel,) = to.glob("*.whl")
    return wheel


def finish(wheel: Path, architecture: str, to: Path) -> None:
    """Gives the wheel its tags, its bill of materials and the licences of what the libraries contain."""
    folder = wheel.parent / "unpacked"
    run(sys.executable, "-m", "wheel", "unpack", "-d", folder, wheel)
    (tree,) = folder.iterdir()
    (info,) = tree.glob("*.dist-info")
    platforms = [
        f"manylinux_{GLIBC.replace('.', '_')}_{architecture}",
        f"manylinux2014_{architecture}",
    ]
    description = info / "WHEEL"
    (tag,) = re.findall(r"^Tag: (\S+?-\S+?)-.*$", description.read_text(), re.M)
    tags = "".join(f"Tag: {tag}-{platform}\n" for platform in platforms)
    description.write_text(re.sub(r"^Tag: .*\n", tags, description.read_text(), flags=re.M))
    sbom.add(info)
    run(sys.executable, "-m", "wheel", "pack", "-d", to, tree)


def normalise(archive: Path, date: int) -> None:
    """Rewrites a source archive: the date of all files is ``date``, and their owner and permissions are fixed, so that
    two builds give the same bytes."""
    with tarfile.open(archive) as source:
        members = [(each, source.extractfile(each)) for each in source.getmembers()]
        contents = [(each, stream.read() if stream else b"") for each, stream in members]
    with (
        open(archive, "wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=date) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member, content in sorted(contents, key=lambda each: each[0].name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, date
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            target.addfile(plain, io.BytesIO(content))


def main(folder: str) -> None:
    to = Path(folder).resolve()
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    WORK.mkdir(parents=True, exist_ok=True)
    # The date of the files in the archives.
    date = subprocess.check_output(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True
    ).strip()
    os.environ.setdefault("SOURCE_DATE_EPOCH", date)
    found = pythons()
    if not found:
        sys.exit("no Python from 3.10 on with headers: install python3-dev, or a Python by pyenv")
    for architecture in ARCHITECTURES:
        for tag, program in found.items():
            print(f"{tag} {architecture}", flush=True)
            wheel = build(environment(tag, program), architecture, WORK / "made")
            finish(wheel, architecture, to)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(to)!r})"
    run(sys.executable, "-c", code)
    (archive,) = to.glob("*.tar.gz")
    normalise(archive, int(os.environ["SOURCE_DATE_EPOCH"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
