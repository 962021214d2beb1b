"""The names of all GPU kernels, from the list from which the core is built."""

import functools
import re
import subprocess

from tests.harness import ROOT
from tests.harness.limits import scaled


@functools.lru_cache(maxsize=1)
def kernel_names() -> tuple[str, ...]:
    """The names that ``csrc/device/cuda/kernels/list.def`` expands to, by the C++ preprocessor."""
    kinds = ("MOVE", "REDUCE", "DOTS", "SUM", "BLEND")
    macros = [f"-DHP_{kind}(name, ...)=KERNEL(name)" for kind in kinds]
    include = f"-I{ROOT / 'csrc' / 'include'}"
    source = ROOT / "csrc" / "device" / "cuda" / "kernels" / "list.def"
    done = subprocess.run(
        ["c++", "-E", "-P", "-x", "c++", "-std=c++20", *macros, include, str(source)],
        capture_output=True,
        text=True,
        check=True,
        timeout=scaled(60),
    )
    return tuple(re.findall(r"KERNEL\((\w+)\)", done.stdout))
