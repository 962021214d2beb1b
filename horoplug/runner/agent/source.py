"""The program that is sent to other hosts as their agent: agent.py, with the modules of the package that it imports."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("horoplug", "horoplug.base", "horoplug.runner", "horoplug.runner.agent")
_MODULES: Final = (
    "horoplug.base.cgroup",
    "horoplug.base.processes",
    "horoplug.base.processors",
    "horoplug.base.thread_share",
    "horoplug.runner.agent.inputs",
)
_AGENT: Final = "horoplug.runner.agent.agent"
# The packages are empty: the agent needs nothing of the package on its host.
_LOADER: Final = """import sys, types
def load(name, source):
    sys.modules[name] = module = types.ModuleType(name)
    package, _, short = name.rpartition(".")
    if package:
        setattr(sys.modules[package], short, module)
    exec(compile(source, name, "exec"), module.__dict__)
"""


@functools.cache
def agent_source() -> bytes:
    """The source, without zero bytes. It ends with the call that starts the agent, so that a part of it does
    nothing."""
    loads = [f"load({name!r}, '')" for name in _PACKAGES]
    loads += [f"load({name!r}, {_source(name)!r})" for name in _MODULES]
    last = f"exec(compile({_source(_AGENT)!r}, {_AGENT!r}, 'exec'))"
    return "\n".join([_LOADER, *loads, last, ""]).encode()


def _source(name: str) -> str:
    found = find_spec(name)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")
