"""Parses the command line of ``horovodrun`` with the table of :mod:`horoplug.runner.command.flags`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from horoplug.runner.checks import UsageError
from horoplug.runner.start.allocation import Scheduler
from horoplug.runner.start.ssh import Ssh
from horoplug.runner.start.step_command import StepCommand
from horoplug.runner.terms import COMMAND_LINE, Terms

from . import config_file
from .flags import FLAGS, Flag, all_flags, attribute


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        error = sys.exc_info()[1]  # what argparse handles

        def text(terms: Terms) -> str:
            if terms is COMMAND_LINE or not isinstance(error, argparse.ArgumentError):
                return f"{message} (horovodrun --help lists the flags)"
            return f"{attribute(error.argument_name or '')}: {error.message}"

        raise UsageError(text)

    def _parse_optional(self, arg_string: str) -> Any:
        # The "-x A -x B" of --mpi-args is a value, although there is a flag -x.
        return None if re.match(r"-\w+ ", arg_string) else super()._parse_optional(arg_string)


@dataclasses.dataclass(frozen=True)
class Options:
    """The parsed command line."""

    command: list[str]
    settings: dict[str, str]
    """Environment variables for the ranks, without prefix."""
    num_proc: int | None = None
    hosts: str | None = None
    scheduler: Scheduler | None = None
    """The scheduler in whose job this process runs, if the hosts are those of the job."""
    hostfile: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh: tuple[str, ...] | None = None
    ssh_strict: bool = False
    forward: Sequence[str] = ()
    remote_python: str | None = None
    network_interfaces: Sequence[str] = ()
    controller: str = "gloo"
    mpi_args: str | None = None
    binding_args: str | None = None
    tcp: bool = False
    verbose: bool = False
    no_status: bool = False
    version: bool = False
    check_build: bool = False
    compat: bool = False
    output_filename: Path | None = None
    prefix_output_with_timestamp: bool = False
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    host_discovery_script: str | None = None
    slots_per_host: int | None = None
    reset_limit: int | None = None
    blacklist_cooldown_range: Sequence[int] | None = None
    replace_slow: str | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether processes may come and go while the job runs."""
        asked = (self.min_num_proc, self.max_num_proc, self.host_discovery_script)
        return any(value is not None for value in asked)

    @property
    def remote(self) -> Ssh:
        """How to reach other hosts. Errors: UsageError for an invalid HOROPLUG_SSH."""
        try:
            program = self.ssh or tuple(shlex.split(os.environ.get("HOROPLUG_SSH", ""))) or ("ssh",)
        except ValueError as error:
            raise UsageError(f"HOROPLUG_SSH is wrong: {str(error).lower()}") from None
        python = self.remote_python or os.environ.get("HOROPLUG_REMOTE_PYTHON") or sys.executable
        return Ssh(program, self.ssh_port, self.ssh_identity_file, python, self.ssh_strict)

    @property
    def step(self) -> StepCommand | None:
        """How to start agents on the nodes of the scheduler's job; None if the hosts are others, the options or
        HOROPLUG_SSH ask for ssh, or the scheduler has no such program here."""
        asked = (self.ssh, self.ssh_port, self.ssh_identity_file, os.environ.get("HOROPLUG_SSH"))
        kind = None if self.scheduler is None else self.scheduler.step
        if kind is None or self.ssh_strict or any(asked):
            return None
        program = shutil.which(kind.program_name)
        return None if program is None else kind(program, self.remote.python)

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Names of network interfaces."""
        return tuple(" ".join(self.network_interfaces).replace(",", " ").split())

    @property
    def variables(self) -> dict[str, str]:
        """Further environment variables for the ranks, by full name."""
        found = {"NCCL_IB_DISABLE": "1"} if self.tcp else {}
        if self.interfaces:
            found["NCCL_SOCKET_IFNAME"] = ",".join(self.interfaces)
        return found


def parse(arguments: Sequence[str]) -> Options:
    """Parse the command line and the configuration file that it names. ``--help`` prints and exits.

    Errors: UsageError."""
    given = vars(build_parser().parse_args(arguments))
    command = given.pop("command", [])
    if "config_file" in given:
        given = config_file.read(given["config_file"]) | given
    return options(given, command[1:] if command[:1] == ["--"] else command)


def options(given: dict[str, Any], command: list[str]) -> Options:
    """The options for values by the flags' attributes. Errors: UsageError."""
    if "hosts" in given and "hostfile" in given:
        raise UsageError(
            lambda t: (
                "argument -hostfile/--hostfile: not allowed with argument -H/--hosts"
                if t is COMMAND_LINE
                else f"{t.hostfile}: not allowed with {t.hosts}"
            )
        )
    fields = {field.name for field in dataclasses.fields(Options)}
    return Options(
        command=command,
        settings={
            flag.variable: flag.text(given[flag.attribute])
            for flag in all_flags()
            if flag.variable and flag.attribute in given
        },
        **{name: value for name, value in given.items() if name in fields},
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, for its values alone: :func:`parse` also reads the configuration file."""
    parser = _Parser(
        prog="horovodrun",
        description="Run a program as N ranks of one job.",
        usage="horovodrun -np N [flags] command [arguments]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # flags that are not given must not override the file
    )
    for heading, flags in FLAGS.items():
        group = parser.add_argument_group(heading) if heading else parser
        for flag in flags:
            _add(group, flag)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def _add(group: argparse._ActionsContainer, flag: Flag) -> None:
    if flag.forms:
        group = group.add_mutually_exclusive_group()
        for form in flag.forms:
            group.add_argument(
                *form.names.split(),
                action="store_const",
                const=form.value,
                dest=flag.attribute,
                help=form.help,
            )
        return
    group.add_argument(
        *flag.names.split(),
        type=flag.kind.parse,
        choices=flag.kind.choices,
        nargs=flag.count,
        action="append" if flag.repeated else "store",
        metavar=flag.kind.metavar,
        dest=flag.attribute,
        help=flag.help,
    )
