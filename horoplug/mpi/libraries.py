"""The MPI libraries that are loaded into this process."""

from __future__ import annotations

import os
import re

_LIBRARY = re.compile(r"libmpi(ch)?(_abi|_mt|_ilp64)?\.so[.\d]*")  # Debian's MPICH: libmpich


def loaded_libraries() -> list[str]:
    """Paths of the MPI libraries that are mapped into this process, in the order of /proc/self/maps."""
    found: dict[str, None] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            path = line.rstrip("\n").partition("/")[2]
            if path and _LIBRARY.fullmatch(os.path.basename(path)):
                found["/" + path] = None
    return list(found)


def check_single_library() -> None:
    """Raise ValueError if this process has loaded two MPI libraries: their symbols would clash."""
    found = loaded_libraries()
    # One MPI may consist of several files in one folder. Debian keeps the files of all its MPIs in the same folder, so
    # that there only the name tells MPICH from the others.
    if len({(os.path.dirname(path), "libmpich." in path) for path in found}) > 1:
        raise ValueError(
            f"two MPI libraries are loaded in this process, {' and '.join(found)}: their symbols clash. Set "
            "MPI4PY_LIBMPI to the library that the rest of the program uses"
        )
