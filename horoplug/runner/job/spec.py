"""What a job is, whatever starts it and however its processes come and go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from horoplug.runner.hosts.hosts import Placement
from horoplug.runner.start.ssh import Ssh
from horoplug.runner.start.step_command import StepCommand
from horoplug.runner.terms import Terms

from .standard_input import NO_INPUT, Input


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """Describes one job."""

    command: Sequence[str]
    size: int
    """The number of ranks; of an elastic job, the largest number that the first hosts allow."""
    hosts: Sequence[Placement]
    """The hosts and their ranks; of an elastic job, those that are known from the beginning."""
    began: float
    """The time from which the start timeout counts (``time.monotonic()``)."""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables for the ranks, without prefix."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables for the ranks, by full name."""
    forward: Sequence[str] = ()
    """Names and patterns of further variables for other hosts."""
    ssh: Ssh = dataclasses.field(default_factory=Ssh)
    """How to reach other hosts, and their Python."""
    step: StepCommand | None = None
    """How to start the agents of other hosts as a step of a scheduler's job, instead of by ssh."""
    interfaces: Sequence[str] = ()
    """Names of the network interfaces to use; empty: they are found automatically."""
    compat: bool = False
    """Whether the ranks import horoplug under the name horovod, too."""
    folder: Path | None = None
    """For the ranks' raw output."""
    timestamps: bool = False
    """Whether the time is printed before every line."""
    verbose: bool = False
    status: bool = False
    """Whether a status line is shown if the output is a terminal."""
    given: Input = NO_INPUT
    """What the ranks read from their standard input."""
    serve: Callable[[str, bytes], Mapping[str, str]] | None = None
    """Called before the ranks start, with an address that all of them reach and the job's secret; returns further
    variables for them. With ``serve``, the caller reports the failure."""
    terms: Terms = dataclasses.field(default_factory=Terms)
    """Those of the caller, for the text of a failure."""
    hosts_may_come: bool = False
    """Whether further hosts may be used while the job runs."""

    @property
    def is_local(self) -> bool:
        """Whether all ranks are, and will be, on this host."""
        return not self.hosts_may_come and all(host.is_local for host in self.hosts)
