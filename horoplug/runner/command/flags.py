"""The table of ``horovodrun``'s flags: Horovod's names and meanings, and the variable that each flag sets.

arguments.py parses command lines with it, and config_file.py configuration files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from .flag_values import (
    SECONDS,
    SECONDS_OR_ZERO,
    SWITCH,
    Kind,
    cpu_list,
    number,
    program,
    text,
    variable_names,
    whole_number,
)

LEVELS: Final = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


class Form(NamedTuple):
    """One form of a flag without a value: its names, the value it stands for, and its help."""

    names: str
    value: Any
    help: str


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag, or several mutually exclusive ones (``forms``).

    ``names``: all names, the canonical one last; ``variable``: the HOROVOD_ variable of the ranks that the flag sets;
    ``config``: ``section.key`` in a configuration file; ``text``: converts a value to the variable's text."""

    names: str
    kind: Kind
    help: str = ""
    variable: str = ""
    config: str = ""
    text: Callable[[Any], str] = str
    forms: tuple[Form, ...] = ()
    count: int | None = None  # number of values, if the flag takes several
    repeated: bool = False  # may be given more than once

    @property
    def attribute(self) -> str:
        """The attribute of the parsed arguments that has the value."""
        return attribute(self.names)


def attribute(names: str) -> str:
    """The attribute of the parsed arguments for a flag, by its names, of which the last one counts."""
    return re.split("[ /]", names)[-1].lstrip("-").replace("-", "_")


def _bit(value: bool) -> str:
    return "1" if value else "0"


def _opposite(value: bool) -> str:
    return _bit(not value)


def _switch(on: str, on_help: str, off: str = "", off_help: str = "", **more: Any) -> Flag:
    forms = (Form(on, True, on_help), *([Form(off, False, off_help)] if off else []))
    return Flag(on, SWITCH, forms=forms, **({"text": _bit} | more))


FLAGS: Final[dict[str, tuple[Flag, ...]]] = {
    "": (
        _switch("-v --version", "print the version"),
        _switch("-cb --check-build",
            "show what this installation supports; with -v also the launcher, the scheduler and MPI"),
        Flag("-np --num-proc", whole_number(1), "number of processes (default: the slots of the scheduler's job)"),
        _switch("--verbose", "print what the launcher does"),
        _switch("--no-status", "show no status line at the bottom of the terminal"),
        _switch("--compat", "make horoplug available to the program under the name horovod"),
        _switch("--as-gloo",
            'put horoplug where the program asks torch.distributed for "gloo" (docs/torch-distributed.md)',
            variable="AS_GLOO"),
        Flag("--config-file", Kind(Path, "FILE", ()),
            "read flags from a YAML file; the command line takes precedence"),
        Flag("--output-filename", Kind(Path, "DIR", ()), "also write the output to DIR/rank.N/stdout and stderr"),
        _switch("-prefix-timestamp --prefix-output-with-timestamp", "print the time before every line"),
        Flag("--start-timeout", SECONDS, "seconds until all ranks must have connected (30)", "START_TIMEOUT"),
        Flag("--gloo-timeout-seconds", SECONDS, "seconds without progress until a transfer fails (30)",
            "GLOO_TIMEOUT_SECONDS", "library_options.gloo_timeout_seconds"),
    ),
    "hosts": (
        Flag("-H --hosts", text("HOST:SLOTS,..."), "hosts, and the number of processes on each (1)"),
        Flag("-hostfile --hostfile", text("FILE"), "file with a line HOST slots=N for each host"),
        Flag("-p --ssh-port", whole_number(1, "PORT"), "port of ssh on other hosts"),
        Flag("-i --ssh-identity-file", text("FILE"), "private key for ssh"),
        Flag("--ssh", Kind(program, "COMMAND", (str,)), "command to use as ssh, may have options (HOROPLUG_SSH)"),
        _switch("--ssh-strict", "refuse hosts whose key ssh does not know yet"),
        _switch("--encrypt", "encrypt all traffic between hosts; needs OpenSSL's libcrypto on every host",
            variable="ENCRYPT"),
        Flag("-x --forward", Kind(variable_names, "NAME,...", (str,)),
            "further variables for ranks on other hosts, also patterns (HOROPLUG_FORWARD). Without it: HOROVOD_*, "
            "HOROPLUG_*, PATH, LD_LIBRARY_PATH, PYTHON*, and those of CUDA, NCCL, OpenMP, MPI and the frameworks "
            "(docs/launch-ssh.md)", repeated=True),
        Flag("--remote-python", text("PATH"),
            "Python on other hosts (HOROPLUG_REMOTE_PYTHON; default: as on this one)"),
        Flag("--network-interface --network-interfaces", text("NAME"),
            "network interface to use; several if its name differs between hosts (HOROVOD_GLOO_IFACE)", repeated=True),
        _switch("--disable-cache", "accepted without effect: hosts are always checked"),
    ),
    "how ranks are started": (
        Flag("--controller", Kind(str, "", (str,), ("gloo", "mpi", "jsrun")), config="controller",
            forms=(
                Form("--gloo", "gloo", "start ranks without MPI (the default)"),
                Form("--mpi", "mpi", "start ranks with the first mpirun on PATH; needs mpi4py"),
                Form("--jsrun", "jsrun", "start ranks with jsrun, in an LSF job; needs mpi4py"),
            )),
        Flag("--mpi-args", text("ARGS"), "further arguments for mpirun or jsrun, in one string"),
        Flag("--binding-args", text("ARGS"),
            "arguments for mpirun or jsrun that bind ranks to cores, instead of the default"),
        _switch("--tcp", "let MPI and NCCL use only TCP, even on a faster network"),
        _switch("--mpi-threads-disable", "tell MPI that only one thread calls it", "--no-mpi-threads-disable",
            "tell MPI that several threads may call it (the default)", variable="MPI_THREADS_DISABLE",
            config="library_options.mpi_threads_disable"),
    ),
    "tuning": (
        Flag("--fusion-threshold-mb", whole_number(0, "MB"), "size of the fusion buffer in MiB (128); 0: no fusion",
            "FUSION_THRESHOLD", "params.fusion_threshold_mb", text=lambda value: str(value << 20)),
        Flag("--cache-capacity", whole_number(0), "number of tensor names to cache; 0: none", "CACHE_CAPACITY",
            "params.cache_capacity"),
        Flag("--thread-affinity", Kind(cpu_list, "CPU,...", (int, str)),
            "CPU for the progress thread of each local rank", "THREAD_AFFINITY", "library_options.thread_affinity"),
        _switch("--thread-share",
            "limit the compute threads of each rank to its share of the host's cores (the default)",
            "--no-thread-share", "leave the number of compute threads to the frameworks", variable="THREAD_SHARE",
            config="params.thread_share"),
        _switch("--hierarchical-allreduce", "allreduce GPU tensors within each host first",
            "--no-hierarchical-allreduce", "do so only where it is faster (the default)",
            variable="HIERARCHICAL_ALLREDUCE", config="params.hierarchical_allreduce"),
    ),
    "autotuning": (
        _switch("--autotune", "tune all settings", "--no-autotune",
            "tune no setting, not even those that cannot change a result", variable="AUTOTUNE",
            config="autotune.enabled"),
        Flag("--autotune-log-file", text("FILE"), "CSV file for the results of tuning", "AUTOTUNE_LOG",
            "autotune.log_file"),
        *(
            Flag(f"--autotune-{name.replace('_', '-')}", whole_number(1), f"{what} ({default})",
                f"AUTOTUNE_{name.upper()}", f"autotune.{name}")
            for name, default, what in (
                ("warmup_samples", 3, "steps to skip after a setting has changed"),
                ("steps_per_sample", 10, "steps to time for each value of a setting"),
                ("bayes_opt_max_samples", 20, "largest number of values to try"),
            )
        ),
    ),
    "timeline": (
        Flag("--timeline-filename", text("FILE"),
            "file for a timeline of the job, for Perfetto; DYNAMIC: start it with start_timeline()", "TIMELINE",
            "timeline.filename"),
        _switch("--timeline-mark-cycles", "mark rounds of negotiation in the timeline", "--no-timeline-mark-cycles",
            "do not mark them (the default)", variable="TIMELINE_MARK_CYCLES", config="timeline.mark_cycles"),
    ),
    "stall check": (
        _switch("--stall-check", "report stalled ranks (the default)", "--no-stall-check", "do not report them",
            variable="STALL_CHECK_DISABLE", config="stall_check.enabled", text=_opposite),
        Flag("--stall-check-warning-time-seconds", SECONDS, "seconds until missing ranks are reported (60)",
            "STALL_CHECK_TIME_SECONDS", "stall_check.warning_time_seconds"),
        Flag("--stall-check-shutdown-time-seconds", SECONDS_OR_ZERO,
            "seconds until missing ranks abort the job (0: never)", "STALL_SHUTDOWN_TIME_SECONDS",
            "stall_check.shutdown_time_seconds"),
    ),
    "logging": (
        Flag("--log-level", Kind(str.upper, "LEVEL", (str,), LEVELS), "lowest level to log: " + ", ".join(LEVELS),
            "LOG_LEVEL", "logging.level", text=str.lower),
        _switch("--no-log-hide-timestamp --log-with-timestamp", "print the time in log lines (the default)",
            "--log-hide-timestamp --log-without-timestamp", "omit the time in log lines", variable="LOG_HIDE_TIME",
            config="logging.with_timestamp", text=_opposite),
    ),
    "accepted, without effect": (
        Flag("--cycle-time-ms", number("number of milliseconds", "MS", zero=True), "horoplug has no cycles",
            "CYCLE_TIME", "params.cycle_time_ms"),
        *(
            _switch(f"--{name.replace('_', '-')}",
                "the algorithm is chosen for each operation; HOROVOD_ALGORITHM forces one",
                f"--no-{name.replace('_', '-')}", "see above", variable=name.upper(), config=f"params.{name}")
            for name in ("hierarchical_allgather", "torus_allreduce")
        ),
        Flag("--autotune-gaussian-process-noise", number("number", "X", zero=True, high=1),
            "tuning compares times directly", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "autotune.gaussian_process_noise"),
        Flag("--num-nccl-streams", whole_number(0), "each process set has a stream of its own for GPU tensors",
            "NUM_NCCL_STREAMS", "library_options.num_nccl_streams"),
    ),
    "elastic jobs": (
        Flag("--min-np --min-num-proc", whole_number(1),
            "smallest number of processes (-np, or 1); the job goes on while it has that many",
            config="elastic.min_np"),
        Flag("--max-np --max-num-proc", whole_number(1), "largest number of processes (-np, or all slots)",
            config="elastic.max_np"),
        Flag("--host-discovery-script", text("COMMAND"),
            "program that prints a line HOST or HOST:SLOTS for each host; called again and again",
            config="elastic.host_discovery_script"),
        Flag("--slots-per-host", whole_number(1), "slots of hosts that the script prints without a number (1)",
            config="elastic.slots_per_host"),
        Flag("--elastic-timeout", SECONDS,
            "seconds to wait for the smallest number of processes (600; HOROVOD_ELASTIC_TIMEOUT)", "ELASTIC_TIMEOUT",
            "elastic.timeout"),
        Flag("--reset-limit", whole_number(1), "how often the processes may form the job again (any number of times)",
            config="elastic.reset_limit"),
        Flag("--blacklist-cooldown-range", whole_number(1, "S"),
            "least and most seconds for which a failed host is not used (for ever)", count=2),
        Flag("--replace-slow", number("number", "FACTOR", zero=False),
            "replace a process that computes for FACTOR times as long as the others, if another host has a free slot",
            config="elastic.replace_slow"),
    ),
}  # fmt: skip
"""All flags, by their heading in ``--help``."""


def all_flags() -> list[Flag]:
    """The whole table in one list."""
    return [flag for flags in FLAGS.values() for flag in flags]
