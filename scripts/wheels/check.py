"""Checks what build.py has made: check.py FOLDER

Every wheel is at most 3 MB, needs nothing that manylinux2014 does not promise, and has its bill of materials and
licences; all wheels of an architecture contain the same libraries but for the one for their Python; indexes can take
all files."""

import collections
import hashlib
import io
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

MOST_BYTES = 3_000_000
GLIBC = 2, 17
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
# manylinux2014 promises these; the C++ runtime is part of the libraries.
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
GLIBC_LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
OWN = {"libhoroplug.so"}
PROBLEMS: list[str] = []


def expect(holds: bool, *problem: object) -> None:
    if not holds:
        PROBLEMS.append(" ".join(map(str, problem)))


def check_library(name: str, content: bytes, architecture: str) -> None:
    elf = ELFFile(io.BytesIO(content))
    expect(elf["e_machine"] == MACHINES[architecture], name, "is for", elf["e_machine"])
    dynamic = elf.get_section_by_name(".dynamic")
    needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    allowed = GLIBC_LIBRARIES | OWN | {LOADERS[architecture]}
    expect(needed <= allowed, name, "needs", sorted(needed - allowed))
    for section in elf.iter_sections():
        if not isinstance(section, GNUVerNeedSection):
            continue
        for _, versions in section.iter_versions():
            for version in versions:
                number = re.fullmatch(r"GLIBC_([0-9.]+)", version.name)
                expect(
                    number is not None and tuple(map(int, number[1].split("."))) <= GLIBC,
                    *(name, "needs symbols of", version.name),
                )


def check_wheel(path: Path, shared: dict[tuple[str, str], set[str]]) -> None:
    size = path.stat().st_size
    print(f"{path.name}: {size:,} bytes")
    expect(size <= MOST_BYTES, path.name, "has", size, "bytes")
    architecture = path.stem.rpartition("_2_17_")[2]
    expect(architecture in MACHINES, path.name, "has no tag of manylinux_2_17")
    libraries = set()
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        for name in names:
            if not name.endswith(".so"):
                continue
            content = wheel.read(name)
            check_library(f"{path.name}: {name}", content, architecture)
            libraries.add(name.split("/")[-1].split(".")[0])
            if "/_native." not in name:
                shared[architecture, name].add(hashlib.sha256(content).hexdigest())
            else:
                expect(f"-{architecture}-linux-gnu.so" in name, path.name, "contains", name)
        bills = [name for name in names if name.endswith(".dist-info/sboms/horoplug.cdx.json")]
        expect(len(bills) == 1, path.name, "has no bill of materials")
        components = [part for bill in bills for part in json.loads(wheel.read(bill))["components"]]
        parts = {part["name"] for part in components}
        licensed = {name.split("/")[2] for name in names if ".dist-info/licenses/" in name}
        expect(licensed == parts | {"LICENSE"}, path.name, "has licences of", sorted(licensed))
    wanted = {"_native", "libhoroplug", "libhoroplug_jax", "libhoroplug_tensorflow"}
    expect(libraries == wanted, path.name, "has", sorted(libraries))
    said = subprocess.run(["auditwheel", "show", path], capture_output=True, text=True)
    tag = f'"manylinux_2_17_{architecture}"'
    expect(tag in said.stdout, f"auditwheel about {path.name}:", said.stdout + said.stderr)


def main(folder: str) -> None:
    wheels = sorted(Path(folder).glob("*.whl"))
    archives = sorted(Path(folder).glob("*.tar.gz"))
    expect(bool(wheels), "no wheel in", folder)
    expect(len(archives) == 1, "not one source archive:", archives)
    shared: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for wheel in wheels:
        check_wheel(wheel, shared)
    for (architecture, name), digests in shared.items():
        expect(len(digests) == 1, name, "differs between wheels for", architecture)
    checked = subprocess.run(["twine", "check", "--strict", *wheels, *archives])
    expect(checked.returncode == 0, "twine check --strict failed")
    sys.exit("\n".join(PROBLEMS) if PROBLEMS else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
