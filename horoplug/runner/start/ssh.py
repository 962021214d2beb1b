"""The ssh command line that starts an agent on another host.

It contains nothing of the job, since every user can read command lines: the agent's source, the environment and the
job's secret go through ssh's standard input."""

from __future__ import annotations

import dataclasses
import shlex
import sys

# Reads the agent's source up to a zero byte. The program contains double quotes only, because the shell of the remote
# user parses it within single quotes. The source ends with the call that starts the agent, so that a truncated source
# does nothing.
BOOTSTRAP = (
    'f=open(0,"rb",0,closefd=False);exec(b"".join(iter(lambda:f.read(1)or bytes(1),bytes(1))))'
)
END_OF_SOURCE = b"\0"


@dataclasses.dataclass(frozen=True)
class Ssh:
    """How to run a command on another host.

    Users put their own options into ``~/.ssh/config``, or into ``program``, where they take precedence over those
    below."""

    program: tuple[str, ...] = ("ssh",)
    """ssh, or a program that accepts its arguments."""
    port: int | None = None
    identity: str | None = None
    """Path of the private key."""
    python: str = sys.executable
    """Python on the other host, where horoplug is installed for it as well."""
    strict: bool = False
    """Whether hosts whose key is unknown are refused, too; changed keys always are."""

    @property
    def host_key_check(self) -> str:
        """The value of ssh's option StrictHostKeyChecking. ``accept-new`` stores the keys of unknown hosts."""
        return "yes" if self.strict else "accept-new"

    @property
    def options(self) -> list[str]:
        """Port and key, as ssh's flags."""
        port = ["-p", str(self.port)] if self.port is not None else []
        return port + (["-i", self.identity] if self.identity is not None else [])

    def command(self, host: str, connect_seconds: float) -> list[str]:
        """The command that runs the agent on a host; it reads the agent's source from its stdin first."""
        options = {
            "BatchMode": "yes",  # no user is there to answer a question
            "ConnectTimeout": str(max(int(connect_seconds), 1)),
            "StrictHostKeyChecking": self.host_key_check,
            # No shared connection, because the end of the connection must mean that the host is lost.
            "ControlPath": "none",
            # Options of the user's configuration that would interfere.
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
            "ServerAliveInterval": "5",
        }
        command = [*self.program]
        for name, value in options.items():
            command += ["-o", f"{name}={value}"]
        command += self.options
        there = f"exec {shlex.quote(self.python)} -I -S -X utf8 -u -c '{BOOTSTRAP}'"
        return [*command, "-T", "-x", "--", host, there]
