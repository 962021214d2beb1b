"""Every environment variable that horoplug reads, in one table, and the frozen result of reading it.

``HOROPLUG_X`` wins over ``HOROVOD_X``. An empty value counts as unset. A wrong value is a ValueError of one line that
names the variable, the value and what is allowed."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from horoplug.base.log import LEVELS

MIB = 1024 * 1024
SECRET_BYTES = 32
MAX_STREAMS = 64


# ---- parsers: text -> value; a ValueError says what is allowed -------------------------------------------------------


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    allowed = f"a whole number from {low}" + ("" if high is None else f" to {high}")

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(allowed) from None
        if value < low or (high is not None and value > high):
            raise ValueError(allowed)
        return value

    return parse


def _number(text: str, allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(allowed) from None
    if not math.isfinite(value):
        raise ValueError(allowed)
    return value


def _seconds(text: str) -> float:
    allowed = "a positive number of seconds"
    value = _number(text, allowed)
    if value <= 0:
        raise ValueError(allowed)
    return value


def _seconds_or_never(text: str) -> float:
    """0 and negative numbers mean never, which the core calls -1."""
    value = _number(text, "a number of seconds (0: never)")
    return value if value > 0 else -1.0


def _seconds_or_zero(text: str) -> float:
    allowed = "a number of seconds (0: never)"
    value = _number(text, allowed)
    if value < 0:
        raise ValueError(allowed)
    return value


def _size_or_off(text: str) -> int:
    """0 means off to Horovod; the core says off with -1, because 0 is its default."""
    return _integer(0, 2**62)(text) or -1


def _steps_or_off(text: str) -> int:
    return _integer(0, 2**16)(text) or -1


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("0 or 1")


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return text.strip().lower()

    return parse


def _text(text: str) -> str:
    return text.strip()


def _cores(text: str) -> tuple[int, ...]:
    try:
        return tuple(_integer(0)(part) for part in text.split(","))
    except ValueError:
        raise ValueError("CPU numbers separated by commas") from None


def parse_secret(text: str) -> bytes:
    """The 32 bytes of a job's secret from 64 hex digits or from base64. Errors: ValueError, without the value."""
    text = text.strip()
    if len(text) == 2 * SECRET_BYTES:
        try:
            return bytes.fromhex(text)
        except ValueError:
            pass
    try:
        secret = base64.b64decode(text, validate=True)
    except binascii.Error:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ValueError("32 bytes as hex or base64")
    return secret


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Variable:
    """One variable: ``name`` without prefix, the field of :class:`Config` that it fills, how, and why."""

    name: str
    field: str
    parse: Callable[[str], Any]
    default: Any
    doc: str
    aliases: tuple[str, ...] = ()  # further full names, weaker than the two prefixed ones
    private: bool = False  # the value must not appear in any message

    @property
    def names(self) -> tuple[str, ...]:
        """Full names, strongest first."""
        return (f"HOROPLUG_{self.name}", f"HOROVOD_{self.name}", *self.aliases)


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "FUSION_THRESHOLD",
        "fusion_threshold",
        _size_or_off,
        128 * MIB,
        "bytes of a fusion buffer; 0: no fusion",
    ),
    Variable(
        "DISABLE_GROUP_FUSION",
        "disable_group_fusion",
        _flag,
        False,
        "1: a group is not fused with other tensors",
    ),
    Variable(
        "CACHE_CAPACITY", "cache_capacity", _size_or_off, 8192, "names that are remembered; 0: none"
    ),
    Variable(
        "PLAN_AFTER_STEPS",
        "plan_after_steps",
        _steps_or_off,
        3,
        "identical steps after which their order is a plan and needs no negotiation; 0: never",
    ),
    Variable(
        "PLAN_BUCKET_SIZE",
        "plan_bucket_size",
        _integer(1, 2**62),
        8 * MIB,
        "bytes of tensors that run together in a plan",
    ),
    Variable(
        "AUTOTUNE",
        "autotune",
        _flag,
        None,
        "1: all settings are tuned from the times of the job's steps; 0: none; unset: those that cannot change a "
        "result. What is set by a variable of its own stays as it is",
    ),
    Variable(
        "AUTOTUNE_LOG", "autotune_log", _text, None, "file for what the tuning has found, as CSV"
    ),
    Variable(
        "AUTOTUNE_WARMUP_SAMPLES",
        "autotune_warmup_samples",
        _integer(1, 2**10),
        3,
        "steps of each value of a setting that do not count",
    ),
    Variable(
        "AUTOTUNE_STEPS_PER_SAMPLE",
        "autotune_steps_per_sample",
        _integer(1, 2**16),
        10,
        "and those that do",
    ),
    Variable(
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "autotune_max_samples",
        _integer(1, 2**10),
        20,
        "values that are tried at most, of all settings together",
    ),
    Variable(
        "STALL_CHECK_DISABLE", "stall_check_disable", _flag, False, "1: never report stalled ranks"
    ),
    Variable(
        "STALL_CHECK_TIME_SECONDS",
        "stall_check_time_seconds",
        _seconds,
        60.0,
        "seconds until a tensor that some ranks wait for is reported",
    ),
    Variable(
        "STALL_SHUTDOWN_TIME_SECONDS",
        "stall_shutdown_time_seconds",
        _seconds_or_zero,
        0.0,
        "seconds until such a tensor aborts the job; 0: never",
    ),
    Variable(
        "GLOO_TIMEOUT_SECONDS",
        "gloo_timeout_seconds",
        _seconds,
        30.0,
        "seconds without progress until a transfer or a connection fails",
    ),
    Variable(
        "OPERATION_TIMEOUT_SECONDS",
        "operation_timeout_seconds",
        _seconds_or_never,
        1800.0,
        "seconds from submission until an operation that is not done aborts the job; 0: never",
    ),
    Variable(
        "DEADLOCK_TIME_SECONDS",
        "deadlock_time_seconds",
        _seconds_or_never,
        5.0,
        "seconds that all ranks wait for different operations until it is an error; 0: never",
    ),
    Variable(
        "START_TIMEOUT",
        "start_timeout",
        _seconds,
        30.0,
        "seconds that ranks wait for each other at the start",
    ),
    Variable("LOG_LEVEL", "log_level", _one_of(*LEVELS), "warning", "least level that is logged"),
    Variable("LOG_HIDE_TIME", "log_hide_time", _flag, False, "1: no time in log lines"),
    Variable("ALGORITHM", "algorithm", _text, None, "forces an algorithm by name where it can run"),
    Variable(
        "HIERARCHICAL_ALLREDUCE",
        "hierarchical_allreduce",
        _flag,
        False,
        "1: allreduces of tensors on GPUs work in each host first; ALGORITHM, if set, goes before",
    ),
    Variable(
        "TIMELINE",
        "timeline",
        _text,
        None,
        "file for a timeline of the job; DYNAMIC: none before start_timeline()",
    ),
    Variable(
        "TIMELINE_MARK_CYCLES",
        "timeline_mark_cycles",
        _flag,
        False,
        "1: rounds of negotiation are marked in the timeline",
    ),
    Variable("RANK", "rank", _integer(0, 2**31 - 2), 0, "number of this process"),
    Variable("SIZE", "size", _integer(1, 2**31 - 1), 1, "processes in the job"),
    Variable("LOCAL_RANK", "local_rank", _integer(0), 0, "number of this process on its host"),
    Variable("LOCAL_SIZE", "local_size", _integer(1), 1, "processes on this host"),
    Variable(
        "CROSS_RANK",
        "cross_rank",
        _integer(0),
        0,
        "number of this host among those with local_rank",
    ),
    Variable("CROSS_SIZE", "cross_size", _integer(1), 1, "hosts that have this local_rank"),
    Variable(
        "HOST_KEY",
        "hostname",
        _text,
        None,
        "ranks share memory only with ranks of the same key",
        aliases=("HOROPLUG_HOSTNAME", "HOROVOD_HOSTNAME"),
    ),
    Variable(
        "GLOO_RENDEZVOUS_ADDR", "rendezvous_addr", _text, None, "address of the rendezvous server"
    ),
    Variable(
        "GLOO_RENDEZVOUS_PORT", "rendezvous_port", _integer(1, 65535), None, "and its TCP port"
    ),
    Variable(
        "RENDEZVOUS_SERVER",
        "rendezvous_server",
        _one_of("launcher", "rank0"),
        "launcher",
        "rank0: rank 0 itself serves the rendezvous at that address",
    ),
    Variable(
        "SECRET_KEY",
        "secret_key",
        parse_secret,
        None,
        "32 bytes as hex or base64",
        aliases=("_HOROVOD_SECRET_KEY",),
        private=True,
    ),
    Variable(
        "CPU_OPERATIONS",
        "cpu_operations",
        _one_of("mpi", "gloo", "ccl"),
        None,
        "mpi: data between hosts goes over MPI; gloo: over TCP; unset: over what is faster",
    ),
    Variable(
        "CONTROLLER",
        "controller",
        _one_of("mpi", "gloo"),
        None,
        "mpi: the job must have been started by mpirun; gloo: data goes over TCP unless CPU_OPERATIONS says otherwise",
    ),
    Variable(
        "MPI_CUDA",
        "mpi_cuda",
        _flag,
        None,
        "1: MPI's nonblocking collectives take memory of NVIDIA's GPUs; 0: they are given none; unset: MPI is asked",
    ),
    Variable(
        "NUM_STREAMS",
        "num_streams",
        _integer(1, MAX_STREAMS),
        1,
        "connections between two ranks on different hosts",
    ),
    Variable("GLOO_IFACE", "gloo_iface", _text, None, "network interface to listen on"),
    Variable(
        "THREAD_AFFINITY",
        "thread_affinity",
        _cores,
        (),
        "CPU numbers; the one at local_rank is for the progress thread",
    ),
    Variable(
        "DYNAMIC_PROCESS_SETS",
        "dynamic_process_sets",
        _flag,
        False,
        "1: process sets may be added and removed after init",
    ),
    Variable(
        "STATUS_SECONDS",
        "status_seconds",
        _seconds_or_zero,
        0.0,
        "how often rank 0 tells the launcher what it has done; 0: never",
    ),
    Variable(
        "ELASTIC",
        "elastic",
        _flag,
        False,
        "1: the number of ranks may change, so one rank prepares for more, too",
    ),
)

# Horovod's knobs that have no counterpart here. Setting them must not break a job.
IGNORED: tuple[str, ...] = (
    "ADASUM_MPI_CHUNK_SIZE",
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    "BATCH_D2D_MEMCOPIES",
    "CCL_CACHE",
    "CYCLE_TIME",
    "DISABLE_NVTX_RANGES",
    "ELASTIC_TIMEOUT",
    "ENABLE_ASYNC_COMPLETION",
    "ENABLE_XLA_OPS",
    "HIERARCHICAL_ALLGATHER",
    "MPI_THREADS_DISABLE",
    "NUM_NCCL_STREAMS",
    "TORUS_ALLREDUCE",
)
# What tuning leaves alone if its variable is set: the core's bit for it.
TUNABLE: dict[str, int] = {"PLAN_BUCKET_SIZE": 1, "NUM_STREAMS": 4, "ALGORITHM": 8}
# With several connections to choose from there is something to tune.
TUNED_STREAMS = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """What the environment says. Times are seconds, sizes bytes; -1 is the core's "off" or "never"."""

    fusion_threshold: int = 128 * MIB
    disable_group_fusion: bool = False
    cache_capacity: int = 8192
    plan_after_steps: int = 3
    plan_bucket_size: int = 8 * MIB
    autotune: bool | None = None
    autotune_log: str | None = None
    autotune_warmup_samples: int = 3
    autotune_steps_per_sample: int = 10
    autotune_max_samples: int = 20
    autotune_fixed: tuple[str, ...] = ()
    """Variables, among those of :data:`TUNABLE`, that the environment sets."""
    stall_check_time_seconds: float = 60.0
    stall_shutdown_time_seconds: float = 0.0
    gloo_timeout_seconds: float = 30.0
    operation_timeout_seconds: float = 1800.0
    deadlock_time_seconds: float = 5.0
    start_timeout: float = 30.0
    log_level: str = "warning"
    log_hide_time: bool = False
    algorithm: str | None = None
    hierarchical_allreduce: bool = False
    timeline: str | None = None
    timeline_mark_cycles: bool = False
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    hostname: str | None = None
    rendezvous_addr: str | None = None
    rendezvous_port: int | None = None
    rendezvous_server: str = "launcher"
    secret_key: bytes | None = dataclasses.field(default=None, repr=False)
    cpu_operations: str | None = None
    controller: str | None = None
    mpi_cuda: bool | None = None
    num_streams: int = 1
    gloo_iface: str | None = None
    thread_affinity: tuple[int, ...] = ()
    dynamic_process_sets: bool = False
    status_seconds: float = 0.0
    elastic: bool = False
    notes: tuple[tuple[int, str], ...] = ()
    """Remarks about the environment, (logging level, text), for :meth:`log_notes`."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """Read ``env`` (default: the process's environment). Errors: ValueError of one line."""
        env = os.environ if env is None else env
        values = {variable.field: _read(variable, env) for variable in VARIABLES}
        values["autotune_fixed"] = fixed = tuple(
            variable.name
            for variable in VARIABLES
            if variable.name in TUNABLE and _given(variable, env)
        )
        if values["autotune"] and "NUM_STREAMS" not in fixed:
            values["num_streams"] = TUNED_STREAMS
        notes: list[tuple[int, str]] = []
        ignored = [name for name in map(_ignored(env), IGNORED) if name]
        if ignored:
            notes.append((logging.INFO, "without effect in horoplug: " + ", ".join(ignored)))
        if values["cpu_operations"] == "ccl":
            notes.append(
                (logging.INFO, "there is no oneCCL in horoplug (HOROVOD_CPU_OPERATIONS=ccl)")
            )
        check = values["stall_check_time_seconds"]
        if values.pop("stall_check_disable"):
            values["stall_check_time_seconds"] = check = -1.0
        if 0 < values["stall_shutdown_time_seconds"] < check:
            notes.append(
                (
                    logging.WARNING,
                    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is ignored, because it is smaller than "
                    "HOROVOD_STALL_CHECK_TIME_SECONDS",
                )
            )
            values["stall_shutdown_time_seconds"] = 0.0
        for kind in ("", "local_", "cross_"):
            number, count = values[kind + "rank"], values[kind + "size"]
            if number >= count:
                upper = kind.upper()
                raise ValueError(
                    f"HOROVOD_{upper}RANK={number} is wrong: with HOROVOD_{upper}SIZE={count} "
                    f"it must be less than {count}"
                )
        return cls(**values, notes=tuple(notes))

    @property
    def gpu_algorithm(self) -> str | None:
        """What is forced for tensors on GPUs, in place of ``algorithm``; None: the same."""
        return "hierarchical" if self.hierarchical_allreduce and self.algorithm is None else None

    @property
    def core_autotune(self) -> tuple[int, int, int, int, int, str]:
        """Mode, what is fixed, steps to warm up, steps that count, most samples and the file, as the core has them."""
        modes = {None: 0, True: 1, False: -1}
        return (
            modes[self.autotune],
            sum(TUNABLE[name] for name in self.autotune_fixed),
            self.autotune_warmup_samples,
            self.autotune_steps_per_sample,
            self.autotune_max_samples,
            (self.autotune_log or "") if self.rank == 0 else "",
        )

    @property
    def core_log_level(self) -> int:
        """The level for the core. It has no number for trace, since 0 is its default."""
        return max(1, LEVELS.index(self.log_level))

    def log_notes(self, logger: logging.Logger) -> None:
        """Log the remarks, each on one line; done after the logger has its level."""
        for level, text in self.notes:
            logger.log(level, "%s", text)


def value(name: str, env: Mapping[str, str] | None = None) -> Any:
    """What an environment, by default the process's, says about one variable of the table, by its name without prefix.
    For what is asked again after ``init``, or before there is a rank. Errors: ValueError of one line."""
    return _read(next(v for v in VARIABLES if v.name == name), os.environ if env is None else env)


def _given(variable: Variable, env: Mapping[str, str]) -> str | None:
    """The strongest of the variable's names that is set."""
    return next((name for name in variable.names if env.get(name, "").strip()), None)


def _read(variable: Variable, env: Mapping[str, str]) -> Any:
    name = _given(variable, env)
    if name is None:
        return variable.default
    text = env[name]
    try:
        return variable.parse(text)
    except ValueError as error:
        shown = "(not shown)" if variable.private else repr(text)
        raise ValueError(f"{name}={shown} is wrong: it must be {error}") from None


def _ignored(env: Mapping[str, str]) -> Callable[[str], str]:
    """A function from a bare name to the full name that is set to something without effect, or ''."""

    def find(name: str) -> str:
        for full in (f"HOROPLUG_{name}", f"HOROVOD_{name}"):
            if env.get(full, "").strip():
                return full
        return ""

    return find
