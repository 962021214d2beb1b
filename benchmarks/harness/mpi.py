"""The MPIs of this machine, and starting a benchmark under one, so that horoplug and MPI see the same ranks.

An MPI is searched for beside Python, in ``build/mpi/NAME`` (where ``make mpi`` installs PyPI's wheels separately, since
their files conflict), and beside each mpirun on PATH.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

BUILD = Path(__file__).resolve().parents[2] / "build" / "mpi"


class Kind(NamedTuple):
    """How to recognise an MPI by its files, and what mpi4py calls its ABI."""

    marker: str
    library: str
    abi: str


KINDS = {
    "openmpi": Kind("ompi_info", "libmpi.so.40", "openmpi"),
    "mpich": Kind("mpichversion", "libmpi.so.12", "mpich"),
    "impi": Kind("impi_info", "libmpi.so.12", "mpich"),
}


class Mpi(NamedTuple):
    name: str
    prefix: Path
    mpirun: Path
    library: Path

    def environment(self) -> dict[str, str]:
        """The variables with which mpirun and mpi4py find this MPI and no other."""
        paths = {"PATH": [self.mpirun.parent], "LD_LIBRARY_PATH": [self.library.parent]}
        added = {"MPI4PY_LIBMPI": str(self.library), "MPI4PY_MPIABI": KINDS[self.name].abi}
        if self.name == "openmpi":
            # By default it refuses to run as root and to start more ranks than cores.
            added |= {
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                "OMPI_MCA_rmaps_base_oversubscribe": "1",
            }
        if self.name == "impi":
            # The variables that its own script would set. Ranks are on this machine and not bound to cores, like those
            # of the other libraries.
            added |= {"I_MPI_ROOT": str(self.prefix), "I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}
        for name, wanted in paths.items():
            known = [os.environ[name]] if name in os.environ else []
            added[name] = os.pathsep.join([*map(str, wanted), *known])
        return added


def find(name: str) -> Mpi | None:
    """The MPI of that name; None if it is not installed."""
    kind = KINDS[name]
    on_path = [Path(folder).parent for folder in os.environ.get("PATH", "").split(os.pathsep)]
    for prefix in [Path(sys.executable).parent.parent, BUILD / name, *on_path]:
        programs = [prefix / "bin" / f"mpirun.{name}", prefix / "bin" / "mpirun"]
        mpirun = next((program for program in programs if program.exists()), None)
        libraries = [prefix / "lib" / kind.library, *prefix.glob(f"lib/*-linux-*/{kind.library}")]
        library = next((file for file in libraries if file.exists()), None)
        if mpirun and library and (prefix / "bin" / kind.marker).exists():
            return Mpi(name, prefix, mpirun, library)
    return None


def installed() -> list[str]:
    return [name for name in KINDS if find(name)]


def start(name: str, ranks: int, script: list[str]) -> None:
    """Replace this process by ``mpirun -np ranks script`` of the MPI of that name (empty: the first that is installed),
    with all ranks on this machine. Raises SystemExit with one line if that MPI is not installed."""
    found = find(name or next(iter(installed()), "openmpi"))
    if found is None:
        raise SystemExit(f"no {name or 'MPI'} is installed here: make mpi")
    mpirun = str(found.mpirun)
    environment = {**os.environ, **found.environment()}
    os.execve(mpirun, [mpirun, "-np", str(ranks), *script], environment)
