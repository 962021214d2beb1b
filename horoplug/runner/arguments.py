"""The flags of ``horovodrun``: Horovod's names and meanings."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from .checks import UsageError
from .remote import Ssh

_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (horovodrun --help lists the flags)")


def _whole(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"a whole number is wanted, not {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"at least {low} is wanted, not {value}")
        return value

    return parse


def _seconds(zero: bool) -> Callable[[str], str]:
    """A number of seconds, kept as text, because it is only passed on."""

    def parse(text: str) -> str:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            kind = "not negative" if zero else "positive"
            raise argparse.ArgumentTypeError(f"a {kind} number of seconds is wanted, not {text!r}")
        return text

    return parse


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says."""

    processes: int | None
    hosts: str | None
    hostfile: str | None
    interfaces: tuple[str, ...]
    ssh: Ssh
    command: list[str]
    verbose: bool
    version: bool
    check_build: bool
    compat: bool
    output_folder: Path | None
    timestamps: bool
    settings: dict[str, str]
    """Environment variables for the ranks, without prefix."""


def _build() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="horovodrun",
        description="Run a program as N ranks of one job.",
        usage="horovodrun -np N [flags] command [arguments]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="print the version")
    add("-np", "--num-proc", type=_whole(1), metavar="N", help="number of processes")
    add("-cb", "--check-build", action="store_true", help="show what this installation can do")
    add("--verbose", action="store_true", help="say what the launcher does")
    add("--compat", action="store_true", help="let the program import horovod: it gets horoplug")
    add("--gloo", action="store_true", help="accepted: what is used anyway")
    add(
        "--output-filename",
        type=Path,
        metavar="DIR",
        help="also write the output to DIR/rank.N/stdout and stderr",
    )
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="print the time before every line",
    )
    add(
        "--start-timeout",
        type=_seconds(zero=False),
        metavar="S",
        help="seconds until all ranks must have found each other (30)",
    )
    add(
        "--gloo-timeout-seconds",
        type=_seconds(zero=False),
        metavar="S",
        help="seconds without progress until a transfer fails (30)",
    )
    _add_hosts(parser)
    tuning = parser.add_argument_group("tuning")
    tuning.add_argument(
        "--fusion-threshold-mb",
        type=_whole(0),
        metavar="MB",
        help="size of the fusion buffer in MiB (128); 0: no fusion",
    )
    tuning.add_argument(
        "--cache-capacity",
        type=_whole(0),
        metavar="N",
        help="tensor names that are remembered; 0: none",
    )
    autotune = parser.add_argument_group("autotuning")
    whether = autotune.add_mutually_exclusive_group()
    whether.add_argument("--autotune", action="store_true", help="tune all settings")
    whether.add_argument(
        "--no-autotune", action="store_true", help="tune none, not even those that change no result"
    )
    autotune.add_argument(
        "--autotune-log-file", metavar="FILE", help="what it has found, as comma-separated values"
    )
    for flag, default, what in (
        ("warmup-samples", 3, "steps of each value of a setting that do not count"),
        ("steps-per-sample", 10, "and those that do"),
        ("bayes-opt-max-samples", 20, "values that are tried at most"),
    ):
        autotune.add_argument(
            f"--autotune-{flag}", type=_whole(1), metavar="N", help=f"{what} ({default})"
        )
    autotune.add_argument(
        "--autotune-gaussian-process-noise",
        type=float,
        metavar="X",
        help="accepted, without effect: times are compared as they are",
    )
    timeline = parser.add_argument_group("timeline")
    timeline.add_argument(
        "--timeline-filename",
        metavar="FILE",
        help="file for a timeline of the job, for Perfetto; DYNAMIC: none before start_timeline()",
    )
    marks = timeline.add_mutually_exclusive_group()
    marks.add_argument(
        "--timeline-mark-cycles", action="store_true", help="mark rounds of negotiation in it"
    )
    marks.add_argument(
        "--no-timeline-mark-cycles", action="store_true", help="do not mark them (the default)"
    )
    stall = parser.add_argument_group("stall check")
    either = stall.add_mutually_exclusive_group()
    either.add_argument("--no-stall-check", action="store_true", help="do not report stalled ranks")
    either.add_argument("--stall-check", action="store_true", help="report them (the default)")
    stall.add_argument(
        "--stall-check-warning-time-seconds",
        type=_seconds(zero=False),
        metavar="S",
        help="seconds until ranks that are waited for are reported (60)",
    )
    stall.add_argument(
        "--stall-check-shutdown-time-seconds",
        type=_seconds(zero=True),
        metavar="S",
        help="seconds until that aborts the job (0: never)",
    )
    logging = parser.add_argument_group("logging")
    logging.add_argument(
        "--log-level",
        type=str.upper,
        choices=_LEVELS,
        metavar="LEVEL",
        help="least level that is logged: " + ", ".join(_LEVELS),
    )
    times = logging.add_mutually_exclusive_group()
    times.add_argument("--log-with-timestamp", action="store_true", help="times in log lines")
    times.add_argument("--log-without-timestamp", action="store_true", help="no times in log lines")
    add("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    """Where ranks run, and how these hosts are reached."""
    group = parser.add_argument_group("hosts")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="hosts and how many processes each has room for (1)",
    )
    which.add_argument(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        help="the same as a file with a line for each: HOST slots=N",
    )
    add = group.add_argument
    add("-p", "--ssh-port", type=_whole(1), metavar="PORT", help="port of ssh on other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    add(
        "--ssh",
        metavar="COMMAND",
        default=os.environ.get("HOROPLUG_SSH") or "ssh",
        help="what is called as ssh, also with options (HOROPLUG_SSH)",
    )
    add(
        "--remote-python",
        metavar="PATH",
        default=os.environ.get("HOROPLUG_REMOTE_PYTHON") or sys.executable,
        help="Python on other hosts (HOROPLUG_REMOTE_PYTHON; as on this one)",
    )
    add(
        "--network-interface",
        "--network-interfaces",
        action="append",
        default=[],
        metavar="NAME",
        help="network interface to use; several, if hosts have other names for it (HOROVOD_GLOO_IFACE)",
    )
    add("--disable-cache", action="store_true", help="accepted: hosts are always checked")


def _program(text: str) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--ssh {text!r}: {error}") from None
    if not words:
        raise UsageError("--ssh wants a command, such as ssh")
    return tuple(words)


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line. Errors: UsageError. ``--help`` prints and exits."""
    found = _build().parse_args(arguments)
    settings: dict[str, str] = {}
    for name, value in (
        ("START_TIMEOUT", found.start_timeout),
        ("GLOO_TIMEOUT_SECONDS", found.gloo_timeout_seconds),
        ("CACHE_CAPACITY", found.cache_capacity),
        ("AUTOTUNE_LOG", found.autotune_log_file),
        ("AUTOTUNE_WARMUP_SAMPLES", found.autotune_warmup_samples),
        ("AUTOTUNE_STEPS_PER_SAMPLE", found.autotune_steps_per_sample),
        ("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", found.autotune_bayes_opt_max_samples),
        ("STALL_CHECK_TIME_SECONDS", found.stall_check_warning_time_seconds),
        ("STALL_SHUTDOWN_TIME_SECONDS", found.stall_check_shutdown_time_seconds),
        ("TIMELINE", found.timeline_filename),
        ("LOG_LEVEL", found.log_level and found.log_level.lower()),
    ):
        if value is not None:
            settings[name] = str(value)
    if found.fusion_threshold_mb is not None:
        settings["FUSION_THRESHOLD"] = str(found.fusion_threshold_mb << 20)
    if found.autotune or found.no_autotune:
        settings["AUTOTUNE"] = "1" if found.autotune else "0"
    if found.no_stall_check or found.stall_check:
        settings["STALL_CHECK_DISABLE"] = "1" if found.no_stall_check else "0"
    if found.timeline_mark_cycles or found.no_timeline_mark_cycles:
        settings["TIMELINE_MARK_CYCLES"] = "1" if found.timeline_mark_cycles else "0"
    if found.log_with_timestamp or found.log_without_timestamp:
        settings["LOG_HIDE_TIME"] = "1" if found.log_without_timestamp else "0"
    command = found.command[1:] if found.command[:1] == ["--"] else found.command
    return Options(
        processes=found.num_proc,
        hosts=found.hosts,
        hostfile=found.hostfile,
        interfaces=tuple(" ".join(found.network_interface).replace(",", " ").split()),
        ssh=Ssh(
            program=_program(found.ssh),
            port=found.ssh_port,
            identity=found.ssh_identity_file,
            python=found.remote_python,
        ),
        command=command,
        verbose=found.verbose,
        version=found.version,
        check_build=found.check_build,
        compat=found.compat,
        output_folder=found.output_filename,
        timestamps=found.prefix_output_with_timestamp,
        settings=settings,
    )
