"""Flux: the hosts of an instance (``flux alloc``, ``flux batch``), and ``flux exec``, which starts one task on each."""

from __future__ import annotations

import errno
import json
import re
import subprocess
from collections.abc import Mapping, Sequence

from horoplug.rendezvous.bootstrap import slurm
from horoplug.runner.hosts.hosts import Host

from .step_command import StepCommand

_SECONDS = 30.0  # for the instance to answer


class Flux(StepCommand):
    """``flux exec`` runs tasks beside the scheduler, so that agents take no cores from the ranks."""

    program_name = "flux"
    name = "flux-exec"
    task_ended = re.compile(r"(?!)")  # it says so only once all tasks have ended
    cancelled = "instance is shutting down"
    node_variable = ""  # the name of a node is that of its host

    def command(self, nodes: Sequence[str], module: str) -> list[str]:
        try:
            brokers = [host.name for host in _resources(self.program)]
            ranks = ",".join(str(brokers.index(node)) for node in nodes)
        except ValueError as error:
            raise OSError(errno.EIO, str(error)) from None
        return [
            *(self.program, "exec", f"--rank={ranks}", "--dir=/"),
            *(self.python, "-X", "utf8", "-m", module),
        ]


def hosts(env: Mapping[str, str], _: str) -> list[Host]:
    """The hosts of the instance, whose slots are the GPUs or, without GPUs, the cores. Errors: ValueError, OSError."""
    return _resources("flux")


def _resources(program: str) -> list[Host]:
    """The hosts in the order of their brokers: Flux's resource set R (RFC 20)."""
    try:
        done = subprocess.run(
            [program, "resource", "R"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            text=True,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"flux resource R has not ended within {_SECONDS:g} s") from None
    if done.returncode:
        raise ValueError(f"flux resource R: {' '.join(done.stderr.split())}")
    try:
        found = json.loads(done.stdout)["execution"]
        names = [name for part in found["nodelist"] for name in slurm.hosts(part)]
        slots: dict[int, int] = {}
        for entry in found["R_lite"]:
            children = entry["children"]
            count = len(_ids(children.get("gpu", "")) or _ids(children["core"]))
            slots |= dict.fromkeys(_ids(entry["rank"]), count)
        return [Host(names[at], slots[rank]) for at, rank in enumerate(sorted(slots))]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"flux resource R has printed no resources: {error!r}") from None


def _ids(text: str) -> list[int]:
    """The numbers of a set of Flux (RFC 22): ``0-3,7``."""
    return [int(name) for name in slurm.hosts(f"[{text}]")] if text else []
