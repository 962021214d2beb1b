"""Unpacks a version of PyTorch from PyPI, for tests: python other_pytorch.py VERSION FOLDER

PyPI has only builds for CUDA, which cannot be imported without several gigabytes of NVIDIA's libraries. Of these, the
small CUDA runtime is installed; the others are replaced by libraries whose functions end the process. So PyTorch finds
no GPU, and computes on the CPU. FOLDER/python goes to PYTHONPATH, FOLDER/libraries to LD_LIBRARY_PATH."""

import collections
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PREFIXES = ("libcu", "libnv", "libnccl")  # names of NVIDIA's libraries
# The versions of symbols are called like their libraries, but for these.
OWNERS = {"NVSHMEM": "libnvshmem_host.so.3"}


def output(*command: object) -> str:
    return subprocess.run(
        list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def unpack(requirement: str, to: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        output(
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder),
            requirement,
        )
        (wheel,) = Path(folder).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(to)


def cuda_runtime(packages: Path) -> str:
    """The requirement for the CUDA runtime of a version of PyTorch."""
    (metadata,) = packages.glob("torch-*.dist-info/METADATA")
    text = metadata.read_text()
    if found := re.search(r"(nvidia-cuda-runtime\S*) *\(?==([0-9.]+)", text):
        return f"{found[1]}=={found[2]}"
    found = re.search(r"cuda-toolkit.*==([0-9]+\.[0-9]+)", text)
    assert found, "PyTorch names no CUDA runtime"
    return f"nvidia-cuda-runtime=={found[1]}.*"


def undefined(libraries: list[Path]) -> tuple[set[str], dict[str, set[str]], set[str]]:
    """NVIDIA's libraries that ``libraries`` need, with the versioned symbols of each, and symbols without a version."""
    needed, versioned, others = set(), collections.defaultdict(set), set()
    for library in libraries:
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", library)))
        for kind, name, version in re.findall(
            r" ([Uw]) ([^@\s]+)(?:@+(\S+))?$",
            output("nm", "-D", "--with-symbol-versions", library),
            re.M,
        ):
            if not version and name.startswith(("cu", "nv", "nccl")) and kind == "U":
                others.add(name)
            elif (owner := OWNERS.get(version, version)).startswith(PREFIXES):
                versioned[owner].add(name)
    own = {library.name for library in libraries}
    return {each for each in needed - own if each.startswith(PREFIXES)}, versioned, others


def make_library(name: str, symbols: set[str], version: str, folder: Path) -> None:
    """A library with these functions, which end the process. ``version``: that of its symbols; empty: none."""
    code = "".join(f"void {each}(void) {{ abort(); }}\n" for each in symbols)
    with tempfile.NamedTemporaryFile("w", suffix=".map") as script:
        script.write(f"{version} {{ global: {' '.join(f'{each};' for each in symbols)} }};")
        script.flush()
        options = [f"-Wl,--version-script={script.name}"] if version and symbols else []
        command = ["cc", "-w", "-shared", "-fPIC", "-xc", "-", f"-Wl,-soname,{name}", *options]
        subprocess.run(
            [*command, "-o", folder / name],
            input=f"void abort(void);\n{code}",
            check=True,
            text=True,
        )


def replace_libraries(packages: Path, unpacked_runtime: Path, stubs: Path) -> None:
    """Fills ``stubs`` with what stands for NVIDIA's libraries, for the PyTorch in the folder ``packages``."""
    (runtime,) = unpacked_runtime.rglob("libcudart.so.*")
    runtime.rename(stubs / runtime.name)
    needed, versioned, others = undefined(sorted((packages / "torch" / "lib").glob("*.so*")))
    for name in needed - {runtime.name}:
        symbols = versioned.get(name, set())
        if name.startswith("libnccl"):
            symbols, tag = symbols | others, ""
        else:
            tag = next((tag for tag, owner in OWNERS.items() if owner == name), name)
        make_library(name, symbols, tag, stubs)


def main() -> None:
    version, folder = sys.argv[1], Path(sys.argv[2])
    packages, stubs = folder / "python", folder / "libraries"
    stubs.mkdir(parents=True, exist_ok=True)
    unpack(f"torch=={version}", packages)
    unpack(cuda_runtime(packages), folder / "runtime")
    replace_libraries(packages, folder / "runtime", stubs)


if __name__ == "__main__":
    main()
