"""Makes the payloads from which agents start processes: the command and environment of the ranks or of the probe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from horoplug.base.thread_share import RANKS
from horoplug.runner.agent.agent import pack_text
from horoplug.runner.elastic.roster import Start
from horoplug.runner.environment import (
    common_environment,
    elastic_environment,
    job_environment,
    rank_environment,
    shares_threads,
)
from horoplug.runner.forwarding import forwarded, not_forwarded
from horoplug.runner.hosts.hosts import Placement, local_and_cross_ranks

from .spec import JobSpec
from .standard_input import READER


class JobDescription:
    """Describes one job to the agents of its hosts."""

    def __init__(self, spec: JobSpec, silence: float, grace: float) -> None:
        """``silence``: seconds without a frame after which agents of other hosts count the launcher as gone; ``grace``:
        seconds between SIGTERM and SIGKILL."""
        self._spec = spec
        self._folder = os.getcwd()  # which may be removed before the last process starts
        self._numbers = local_and_cross_ranks(spec.hosts)
        self._silence = silence
        self._grace = grace
        self._variables = dict(spec.variables)

    def not_forwarded(self) -> list[str]:
        """The names of the launcher's variables that other hosts do not get."""
        return not_forwarded(os.environ, self._spec.forward)

    def begin(self, server: tuple[str, int], secret: bytes) -> None:
        """Set address and port of the rendezvous, and the job's secret, and start the caller's server, if there is one:
        its variables are added to those of the ranks."""
        self._server, self._secret = server, secret
        if self._spec.serve is not None:
            self._variables |= self._spec.serve(server[0], secret)

    def check(self, host: Placement) -> bytes:
        """The payload for an agent that starts the probe of its host."""
        python = sys.executable if host.is_local else self._spec.ssh.python
        command = [python, "-m", "horoplug.runner.network.probe"]
        return self._describe(host, command, self._common(host))

    def ranks(self, host: Placement, interface: str | None) -> bytes:
        """The payload for an agent that starts the ranks of its host. ``interface``: the network interface on which
        the ranks listen, None: any."""
        ranks = {rank: rank_environment(rank, self._numbers[rank]) for rank in host.ranks}
        return self._processes(host, interface, self._spec.size, ranks)

    def process(
        self, host: Placement, interface: str | None, start: Start, size: int, most: int
    ) -> bytes:
        """The payload for an agent that starts one process of an elastic job. ``size``: the number of live processes;
        ``most``: of those that the host may have. ``interface``: see :meth:`ranks`."""
        own = elastic_environment(
            *(start.process, start.slot, start.local_slot, start.restarts, size, most)
        )
        return self._processes(host, interface, size, {start.process: own}, keep=True)

    def _processes(
        self,
        host: Placement,
        interface: str | None,
        size: int,
        ranks: Mapping[int, Mapping[str, str]],
        *,
        keep: bool = False,
    ) -> bytes:
        env = job_environment(
            self._common(host),
            size=size,
            server=self._server,
            secret=self._secret,
            host=None if self._spec.is_local else host.name,
            interface=interface,
        )
        env |= self._variables
        if not shares_threads(env):
            ranks = {
                rank: {n: v for n, v in own.items() if n != RANKS} for rank, own in ranks.items()
            }
        command = [*self._spec.command]
        if self._spec.serve is not None and command[0] == sys.executable and not host.is_local:
            command[0] = self._spec.ssh.python  # run the function with that host's Python
        started = [{"rank": rank, "env": _packed(own)} for rank, own in ranks.items()]
        return self._describe(host, command, env, ranks=started, keep=keep)

    def _common(self, host: Placement) -> dict[str, str]:
        outer = os.environ if host.is_local else forwarded(os.environ, self._spec.forward)
        return common_environment(outer, self._spec.settings, compat=self._spec.compat)

    def _describe(
        self, host: Placement, command: Sequence[str], env: Mapping[str, str], **further: Any
    ) -> bytes:
        """The payload for an agent, as agent.py describes it."""
        given = self._spec.given
        job = {
            "command": [pack_text(part) for part in command],
            "cwd": pack_text(self._folder),
            "env": _packed(env),
            "inherit": not host.is_local,
            "silence": None if host.is_local else self._silence,
            "grace": self._grace,
            "program": None if given.program is None else given.program.decode("latin-1"),
            "reader": READER if given.is_read else None,
        }
        return json.dumps(job | further).encode()


def _packed(variables: Mapping[str, str]) -> dict[str, str]:
    return {pack_text(name): pack_text(value) for name, value in variables.items()}
