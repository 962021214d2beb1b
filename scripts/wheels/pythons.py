"""The Pythons of this machine for which wheels are built."""

import os
import re
import subprocess
from pathlib import Path

PROBE = """
import os, sys, sysconfig
tag = "cp%d%d%s" % (*sys.version_info[:2], getattr(sys, "abiflags", ""))
header = os.path.join(sysconfig.get_path("include"), "Python.h")
usable = sys.version_info >= (3, 10) and sys.implementation.name == "cpython" and os.path.exists(header)
print(tag if usable else "")
"""


def pythons() -> dict[str, str]:
    """The Pythons of this machine that have headers, by their tags (cp311, cp313t)."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted((pyenv / "versions").glob("*/bin"))
    found: dict[str, str] = {}
    for folder in folders:
        for program in sorted(folder.glob("python3.*")):
            if not re.fullmatch(r"python3\.[0-9]+t?", program.name):
                continue
            asked = subprocess.run([program, "-c", PROBE], capture_output=True, text=True)
            tag = asked.stdout.strip()
            if asked.returncode == 0 and tag:
                found.setdefault(tag, str(program))
    return dict(sorted(found.items()))
