"""How a host is reached: the command line of ssh, and what Python does at its other end.

Nothing of the job is on that command line, where anybody could read it: the agent's source, the environment and the
job's secret go through ssh's standard input."""

from __future__ import annotations

import dataclasses
import shlex
import sys

# Reads the agent's source up to a zero byte. Double quotes only: it goes through a shell at the other end, whatever
# that is. The source ends with the call that begins everything, so that a part of it does nothing.
_BOOTSTRAP = (
    'f=open(0,"rb",0,closefd=False);exec(b"".join(iter(lambda:f.read(1)or bytes(1),bytes(1))))'
)
END_OF_SOURCE = b"\0"


@dataclasses.dataclass(frozen=True)
class Ssh:
    """How to run something on another host. Options of one's own belong into ``~/.ssh/config``, or into ``program``,
    where they win over those that are given here."""

    program: tuple[str, ...] = ("ssh",)
    """ssh, or what takes its arguments."""
    port: int | None = None
    identity: str | None = None
    """File of the private key."""
    python: str = sys.executable
    """Python at the other end; horoplug is installed for it there, too."""

    @property
    def options(self) -> list[str]:
        """Port and key, as ssh's flags."""
        port = ["-p", str(self.port)] if self.port is not None else []
        return port + (["-i", self.identity] if self.identity is not None else [])

    def command(self, host: str, connect_seconds: float) -> list[str]:
        """A command that runs the agent on a host, whose source it reads first."""
        options = {
            "BatchMode": "yes",  # nobody is there to answer a question
            "ConnectTimeout": str(max(int(connect_seconds), 1)),
            # A key that is seen for the first time is remembered, and one that has changed is refused.
            "StrictHostKeyChecking": "accept-new",
            # A connection of its own, so that its end says something about the host.
            "ControlPath": "none",
            # What somebody's configuration may have for this host, and what would be in the way.
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
            "ServerAliveInterval": "5",
        }
        command = [*self.program]
        for name, value in options.items():
            command += ["-o", f"{name}={value}"]
        command += self.options
        there = f"exec {shlex.quote(self.python)} -I -S -X utf8 -u -c '{_BOOTSTRAP}'"
        return [*command, "-T", "-x", "--", host, there]
