"""The flags of ``horovodrun`` as one table: Horovod's names and meanings, and what each sets.

:mod:`horoplug.runner.arguments` reads command lines by it, :mod:`horoplug.runner.config_file` configuration files."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

LEVELS: Final = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


# ---- kinds of values -------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """How a value is read. ``parse`` raises argparse.ArgumentTypeError with what is wanted; ``yaml``: the types that
    the value may have in a configuration file."""

    parse: Callable[[str], Any]
    metavar: str
    yaml: tuple[type, ...]
    choices: tuple[str, ...] | None = None


def _whole(low: int, metavar: str = "N") -> Kind:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"a whole number is wanted, not {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"at least {low} is wanted, not {value}")
        return value

    return Kind(parse, metavar, (int,))


def _number(what: str, metavar: str, zero: bool, high: float = math.inf) -> Kind:
    """A number, kept as text, because it is only passed on."""

    def parse(text: str) -> str:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero) or value > high:
            kind = "not negative" if zero else "positive"
            limit = f" up to {high:g}" if high < math.inf else ""
            raise argparse.ArgumentTypeError(f"a {kind} {what}{limit} is wanted, not {text!r}")
        return text

    return Kind(parse, metavar, (int, float))


def _cores(text: str) -> str:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(
            f"CPU numbers separated by commas are wanted, not {text!r}"
        )
    return text


def _program(text: str) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if not words:
        raise argparse.ArgumentTypeError("a command is wanted, such as ssh")
    return tuple(words)


def _text(metavar: str) -> Kind:
    return Kind(str, metavar, (str,))


_SECONDS = _number("number of seconds", "S", zero=False)
_SECONDS_OR_ZERO = _number("number of seconds", "S", zero=True)
_SWITCH = Kind(str, "", (bool,))


# ---- flags -----------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """One way to give a flag without a value: its names, the value it stands for, and what it is good for."""

    names: str
    value: Any
    help: str


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag, or several that exclude each other (``forms``).

    ``names``: all, the canonical one last; ``variable``: the HOROVOD_ variable of the ranks that it sets; ``config``:
    ``section.key`` in a configuration file; ``text``: the variable's text for a value; ``later``: refused as not
    available yet."""

    names: str
    kind: Kind
    help: str = ""
    variable: str = ""
    config: str = ""
    text: Callable[[Any], str] = str
    forms: tuple[Form, ...] = ()
    count: int | None = None  # of values, if there are several
    repeated: bool = False  # may be given more than once
    later: bool = False

    @property
    def attribute(self) -> str:
        """The name of the value."""
        return self.names.split()[-1].lstrip("-").replace("-", "_")


def _bit(value: bool) -> str:
    return "1" if value else "0"


def _opposite(value: bool) -> str:
    return _bit(not value)


def _switch(on: str, on_help: str, off: str = "", off_help: str = "", **more: Any) -> Flag:
    forms = (Form(on, True, on_help), *([Form(off, False, off_help)] if off else []))
    return Flag(on, _SWITCH, forms=forms, **({"text": _bit} | more))


def _elastic(names: str, kind: Kind, what: str, count: int | None = None) -> Flag:
    return Flag(names, kind, f"{what}; not available yet", count=count, later=True)


FLAGS: Final[dict[str, tuple[Flag, ...]]] = {
    "": (
        _switch("-v --version", "print the version"),
        _switch(
            "-cb --check-build",
            "show what this installation can do; with -v also who has started it, and which MPI there is",
        ),
        Flag("-np --num-proc", _whole(1), "number of processes (as many as a scheduler has given)"),
        _switch("--verbose", "say what the launcher does"),
        _switch("--no-status", "no line about the job's state at the bottom of the terminal"),
        _switch("--compat", "let the program import horovod: it gets horoplug"),
        Flag(
            "--config-file",
            Kind(Path, "FILE", ()),
            "read flags from a YAML file; those given here win",
        ),
        Flag(
            "--output-filename",
            Kind(Path, "DIR", ()),
            "also write the output to DIR/rank.N/stdout and stderr",
        ),
        _switch(
            "-prefix-timestamp --prefix-output-with-timestamp", "print the time before every line"
        ),
        Flag(
            "--start-timeout",
            _SECONDS,
            "seconds until all ranks must have found each other (30)",
            "START_TIMEOUT",
        ),
        Flag(
            "--gloo-timeout-seconds",
            _SECONDS,
            "seconds without progress until a transfer fails (30)",
            "GLOO_TIMEOUT_SECONDS",
            "library_options.gloo_timeout_seconds",
        ),
    ),
    "hosts": (
        Flag(
            "-H --hosts",
            _text("HOST:SLOTS,..."),
            "hosts and how many processes each has room for (1)",
        ),
        Flag(
            "-hostfile --hostfile",
            _text("FILE"),
            "the same as a file with a line for each: HOST slots=N",
        ),
        Flag("-p --ssh-port", _whole(1, "PORT"), "port of ssh on other hosts"),
        Flag("-i --ssh-identity-file", _text("FILE"), "private key for ssh"),
        Flag(
            "--ssh",
            Kind(_program, "COMMAND", (str,)),
            "what is called as ssh, also with options (HOROPLUG_SSH)",
        ),
        Flag(
            "--remote-python",
            _text("PATH"),
            "Python on other hosts (HOROPLUG_REMOTE_PYTHON; as on this one)",
        ),
        Flag(
            "--network-interface --network-interfaces",
            _text("NAME"),
            "network interface to use; several, if hosts have other names for it (HOROVOD_GLOO_IFACE)",
            repeated=True,
        ),
        _switch("--disable-cache", "accepted: hosts are always checked"),
    ),
    "who starts the ranks": (
        Flag(
            "--controller",
            Kind(str, "", (str,), ("gloo", "mpi", "jsrun")),
            config="controller",
            forms=(
                Form("--gloo", "gloo", "horovodrun itself (the default)"),
                Form("--mpi", "mpi", "mpirun, of whichever MPI comes first on PATH; needs mpi4py"),
                Form("--jsrun", "jsrun", "jsrun, in a job of LSF; needs mpi4py"),
            ),
        ),
        Flag("--mpi-args", _text("ARGS"), "further arguments for mpirun or jsrun, in one string"),
        Flag("--binding-args", _text("ARGS"), "instead of the arguments that bind ranks to cores"),
        _switch("--tcp", "MPI and NCCL use TCP even where there is something faster"),
        _switch(
            "--mpi-threads-disable",
            "MPI is told that one thread uses it",
            "--no-mpi-threads-disable",
            "several do (the default)",
            variable="MPI_THREADS_DISABLE",
            config="library_options.mpi_threads_disable",
        ),
    ),
    "tuning": (
        Flag(
            "--fusion-threshold-mb",
            _whole(0, "MB"),
            "size of the fusion buffer in MiB (128); 0: no fusion",
            "FUSION_THRESHOLD",
            "params.fusion_threshold_mb",
            text=lambda value: str(value << 20),
        ),
        Flag(
            "--cache-capacity",
            _whole(0),
            "tensor names that are remembered; 0: none",
            "CACHE_CAPACITY",
            "params.cache_capacity",
        ),
        Flag(
            "--thread-affinity",
            Kind(_cores, "CPU,...", (int, str)),
            "CPU for the progress thread of each local rank",
            "THREAD_AFFINITY",
            "library_options.thread_affinity",
        ),
        _switch(
            "--hierarchical-allreduce",
            "allreduces of tensors on GPUs work in each host first",
            "--no-hierarchical-allreduce",
            "only where that is faster (the default)",
            variable="HIERARCHICAL_ALLREDUCE",
            config="params.hierarchical_allreduce",
        ),
    ),
    "autotuning": (
        _switch(
            "--autotune",
            "tune all settings",
            "--no-autotune",
            "tune none, not even those that change no result",
            variable="AUTOTUNE",
            config="autotune.enabled",
        ),
        Flag(
            "--autotune-log-file",
            _text("FILE"),
            "what it has found, as comma-separated values",
            "AUTOTUNE_LOG",
            "autotune.log_file",
        ),
        *(
            Flag(
                f"--autotune-{name.replace('_', '-')}",
                _whole(1),
                f"{what} ({default})",
                f"AUTOTUNE_{name.upper()}",
                f"autotune.{name}",
            )
            for name, default, what in (
                ("warmup_samples", 3, "steps of each value of a setting that do not count"),
                ("steps_per_sample", 10, "and those that do"),
                ("bayes_opt_max_samples", 20, "values that are tried at most"),
            )
        ),
    ),
    "timeline": (
        Flag(
            "--timeline-filename",
            _text("FILE"),
            "file for a timeline of the job, for Perfetto; DYNAMIC: none before start_timeline()",
            "TIMELINE",
            "timeline.filename",
        ),
        _switch(
            "--timeline-mark-cycles",
            "mark rounds of negotiation in it",
            "--no-timeline-mark-cycles",
            "do not mark them (the default)",
            variable="TIMELINE_MARK_CYCLES",
            config="timeline.mark_cycles",
        ),
    ),
    "stall check": (
        _switch(
            "--stall-check",
            "report stalled ranks (the default)",
            "--no-stall-check",
            "do not report them",
            variable="STALL_CHECK_DISABLE",
            config="stall_check.enabled",
            text=_opposite,
        ),
        Flag(
            "--stall-check-warning-time-seconds",
            _SECONDS,
            "seconds until ranks that are waited for are reported (60)",
            "STALL_CHECK_TIME_SECONDS",
            "stall_check.warning_time_seconds",
        ),
        Flag(
            "--stall-check-shutdown-time-seconds",
            _SECONDS_OR_ZERO,
            "seconds until that aborts the job (0: never)",
            "STALL_SHUTDOWN_TIME_SECONDS",
            "stall_check.shutdown_time_seconds",
        ),
    ),
    "logging": (
        Flag(
            "--log-level",
            Kind(str.upper, "LEVEL", (str,), LEVELS),
            "least level that is logged: " + ", ".join(LEVELS),
            "LOG_LEVEL",
            "logging.level",
            text=str.lower,
        ),
        _switch(
            "--no-log-hide-timestamp --log-with-timestamp",
            "times in log lines (the default)",
            "--log-hide-timestamp --log-without-timestamp",
            "no times in log lines",
            variable="LOG_HIDE_TIME",
            config="logging.with_timestamp",
            text=_opposite,
        ),
    ),
    "accepted, without effect": (
        Flag(
            "--cycle-time-ms",
            _number("number of milliseconds", "MS", zero=True),
            "nothing is done in cycles",
            "CYCLE_TIME",
            "params.cycle_time_ms",
        ),
        *(
            _switch(
                f"--{name.replace('_', '-')}",
                "the algorithm is chosen for each operation; HOROVOD_ALGORITHM forces one",
                f"--no-{name.replace('_', '-')}",
                "likewise",
                variable=name.upper(),
                config=f"params.{name}",
            )
            for name in ("hierarchical_allgather", "torus_allreduce")
        ),
        Flag(
            "--autotune-gaussian-process-noise",
            _number("number", "X", zero=True, high=1),
            "times are compared as they are",
            "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
            "autotune.gaussian_process_noise",
        ),
        Flag(
            "--num-nccl-streams",
            _whole(0),
            "tensors on GPUs have a stream of their own for each process set",
            "NUM_NCCL_STREAMS",
            "library_options.num_nccl_streams",
        ),
    ),
    "elastic jobs": (
        _elastic("--min-np --min-num-proc", _whole(1), "least number of processes"),
        _elastic("--max-np --max-num-proc", _whole(1), "largest number of processes"),
        _elastic("--slots-per-host", _whole(1), "slots of a host that does not say"),
        _elastic(
            "--host-discovery-script", _text("FILE"), "program that lists the hosts there are"
        ),
        _elastic("--elastic-timeout", _SECONDS, "seconds to wait for enough hosts"),
        _elastic("--reset-limit", _whole(1), "changes of hosts until the job ends"),
        _elastic(
            "--blacklist-cooldown-range", _whole(1, "S"), "seconds that a bad host is left out", 2
        ),
    ),
}
"""By heading in ``--help``."""


def all_flags() -> list[Flag]:
    """The whole table in one list."""
    return [flag for flags in FLAGS.values() for flag in flags]
