"""What each front end calls the things that a user may set."""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True)
class Terms:
    """The names of a front end, by default those of arguments of Python."""

    size: str = "num_proc"
    minimum: str = "min_num_proc"
    maximum: str = "max_num_proc"
    timeout: str = "elastic_timeout"
    resets: str = "reset_limit"
    cooldown: str = "cooldown_range"
    hosts: str = "hosts"
    hostfile: str = "hostfile"
    discovery: str = "host_discovery_script"
    interface: str = "network_interface"
    forward: str = "HOROPLUG_FORWARD"
    output: str = "output_filename"
    mpi_args: str = "mpi_args"
    ssh: str = "HOROPLUG_SSH=ssh"
    """How to have agents started by ssh."""


COMMAND_LINE: Final = Terms(
    size="-np",
    minimum="--min-np",
    maximum="--max-np",
    timeout="--elastic-timeout",
    resets="--reset-limit",
    cooldown="--blacklist-cooldown-range",
    hosts="-H",
    hostfile="-hostfile",
    discovery="--host-discovery-script",
    interface="--network-interface",
    forward="-x",
    output="--output-filename",
    mpi_args="--mpi-args and --binding-args",
    ssh="--ssh ssh",
)
