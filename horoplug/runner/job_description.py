"""Makes the payloads from which agents start processes: the command and environment of the ranks or of the probe."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from horoplug.base.thread_share import RANKS

from .agent_connection import AgentConnection, describe_job
from .elastic.roster import Start
from .environment import (
    common_environment,
    elastic_environment,
    job_environment,
    rank_environment,
    shares_threads,
)
from .forwarding import forwarded, not_forwarded
from .hosts import Placement, local_and_cross_ranks
from .job_spec import JobSpec


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

    def check(self, connection: AgentConnection) -> bytes:
        """The payload for an agent that starts the probe of its host."""
        python = sys.executable if connection.host.is_local else self._spec.ssh.python
        command = [python, "-m", "horoplug.runner.probe"]
        return self._describe(connection, command, self._common(connection), None)

    def not_forwarded(self) -> list[str]:
        """The names of the launcher's variables that other hosts do not get."""
        return not_forwarded(os.environ, self._spec.forward)

    def serve(self, address: str, secret: bytes) -> None:
        """Start the caller's server, if there is one, and add the variables that it returns to those of the ranks."""
        if self._spec.serve is not None:
            self._variables |= self._spec.serve(address, secret)

    def ranks(
        self,
        connection: AgentConnection,
        server: tuple[str, int],
        secret: bytes,
        interface: str | None,
    ) -> bytes:
        """The payload for an agent that starts the ranks of its host.

        ``server``: address and port of the rendezvous; ``interface``: the network interface on which the ranks
        listen, None: any."""
        host = connection.host
        env = self._job_environment(connection, server, secret, interface, self._spec.size)
        ranks = {rank: rank_environment(rank, self._numbers[rank]) for rank in host.ranks}
        return self._describe(connection, self._command_on(host), env, ranks)

    def process(
        self,
        connection: AgentConnection,
        server: tuple[str, int],
        secret: bytes,
        interface: str | None,
        start: Start,
        size: int,
        most: int,
    ) -> bytes:
        """The payload for an agent that starts one process of an elastic job. ``size``: the number of live processes;
        ``most``: of those that the host may have. The other arguments are those of :meth:`ranks`."""
        env = self._job_environment(connection, server, secret, interface, size)
        own = elastic_environment(
            *(start.process, start.slot, start.local_slot, start.restarts, size, most)
        )
        command = self._command_on(connection.host)
        return self._describe(connection, command, env, {start.process: own}, keep=True)

    def _job_environment(
        self,
        connection: AgentConnection,
        server: tuple[str, int],
        secret: bytes,
        interface: str | None,
        size: int,
    ) -> dict[str, str]:
        env = job_environment(
            self._common(connection),
            size=size,
            server=server,
            secret=secret,
            host=None if self._spec.is_local else connection.host.name,
            interface=interface,
        )
        return env | self._variables

    def _command_on(self, host: Placement) -> list[str]:
        command = [*self._spec.command]
        if self._spec.serve is not None and command[0] == sys.executable and not host.is_local:
            command[0] = self._spec.ssh.python  # run the function with that host's Python
        return command

    def _common(self, connection: AgentConnection) -> dict[str, str]:
        local = connection.host.is_local
        outer = os.environ if local else forwarded(os.environ, self._spec.forward)
        return common_environment(outer, self._spec.settings, compat=self._spec.compat)

    def _describe(
        self,
        connection: AgentConnection,
        command: list[str],
        env: Mapping[str, str],
        ranks: Mapping[int, Mapping[str, str]] | None,
        *,
        keep: bool = False,
    ) -> bytes:
        remote = not connection.host.is_local
        if ranks is not None and not shares_threads(env):
            ranks = {
                rank: {n: v for n, v in own.items() if n != RANKS} for rank, own in ranks.items()
            }
        return describe_job(
            command,
            self._folder,
            env,
            ranks,
            inherit=remote,
            silence=self._silence if remote else None,
            grace=self._grace,
            keep=keep,
            given=self._spec.given,
        )
