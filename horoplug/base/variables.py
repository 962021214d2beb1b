"""The table of all environment variables that horoplug reads.

``HOROPLUG_X`` takes precedence over ``HOROVOD_X``. An empty value counts as unset. A wrong value raises ValueError with
one line that names the variable, the value and the allowed values. :mod:`horoplug.base.config` reads the
environment."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
import signal
from collections.abc import Callable, Mapping
from typing import Any

from horoplug.base.log import LEVELS

MIB = 1024 * 1024
SECRET_BYTES = 32
MAX_STREAMS = 64


# ---- parsers: text -> value; their ValueErrors name the allowed values -----------------------------------------------


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


def _signal(text: str) -> int:
    name = text.upper().removeprefix("SIG")
    number = {each.name.removeprefix("SIG"): each.value for each in signal.Signals}.get(name)
    if number is None:
        raise ValueError("the name of a signal, such as SIGUSR1")
    return number


def _seconds(text: str) -> float:
    allowed = "a positive number of seconds"
    value = _number(text, allowed)
    if value <= 0:
        raise ValueError(allowed)
    return value


def _seconds_or_never(text: str) -> float:
    """0 and negative numbers mean never; the core expects -1 for that."""
    value = _number(text, "a number of seconds (0: never)")
    return value if value > 0 else -1.0


def _seconds_or_zero(text: str) -> float:
    allowed = "a number of seconds (0: never)"
    value = _number(text, allowed)
    if value < 0:
        raise ValueError(allowed)
    return value


def _size_or_off(text: str) -> int:
    """Horovod's 0 means off; the core expects -1 for that, since its 0 means the default."""
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
    """The 32 bytes of a job's secret from 64 hex digits or from base64. Raises ValueError, whose text omits the
    value."""
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
    """An environment variable.

    ``name``: without prefix; ``field``: the field of :class:`horoplug.base.config.Config` that it fills; ``parse``:
    converts the text, or raises a ValueError with the allowed values; ``doc``: what the variable does."""

    name: str
    field: str
    parse: Callable[[str], Any]
    default: Any
    doc: str
    aliases: tuple[str, ...] = ()  # further full names, after the two prefixed ones in precedence
    private: bool = False  # the value must not appear in messages

    @property
    def names(self) -> tuple[str, ...]:
        """Full names, in order of precedence."""
        return (f"HOROPLUG_{self.name}", f"HOROVOD_{self.name}", *self.aliases)


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "FUSION_THRESHOLD",
        "fusion_threshold",
        _size_or_off,
        128 * MIB,
        "bytes of the fusion buffer; 0: no fusion",
    ),
    Variable(
        "DISABLE_GROUP_FUSION",
        "disable_group_fusion",
        _flag,
        False,
        "1: do not fuse the tensors of a group with others",
    ),
    Variable(
        "CACHE_CAPACITY",
        "cache_capacity",
        _size_or_off,
        8192,
        "number of tensor names to cache; 0: none",
    ),
    Variable(
        "PLAN_AFTER_STEPS",
        "plan_after_steps",
        _steps_or_off,
        3,
        "identical steps after which their order becomes a plan, which needs no negotiation; 0: never",
    ),
    Variable(
        "PLAN_BUCKET_SIZE",
        "plan_bucket_size",
        _integer(1, 2**62),
        8 * MIB,
        "bytes of the tensors in one batch of a plan",
    ),
    Variable(
        "AUTOTUNE",
        "autotune",
        _flag,
        None,
        "1: tune all settings by the times of the job's steps; 0: tune none; unset: tune those that cannot change a "
        "result. A setting whose own variable is set is not tuned",
    ),
    Variable("AUTOTUNE_LOG", "autotune_log", _text, None, "CSV file for the results of tuning"),
    Variable(
        "AUTOTUNE_WARMUP_SAMPLES",
        "autotune_warmup_samples",
        _integer(1, 2**10),
        3,
        "warm-up steps of each value of a setting, which are not timed",
    ),
    Variable(
        "AUTOTUNE_STEPS_PER_SAMPLE",
        "autotune_steps_per_sample",
        _integer(1, 2**16),
        10,
        "steps to time for each value of a setting",
    ),
    Variable(
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "autotune_max_samples",
        _integer(1, 2**10),
        20,
        "largest number of values to try, for all settings together",
    ),
    Variable(
        "STALL_CHECK_DISABLE", "stall_check_disable", _flag, False, "1: never report stalled ranks"
    ),
    Variable(
        "STALL_CHECK_TIME_SECONDS",
        "stall_check_time_seconds",
        _seconds,
        60.0,
        "seconds until a tensor that only some ranks have submitted is reported",
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
        "seconds from its submission until an unfinished operation aborts the job; 0: never",
    ),
    Variable(
        "DEADLOCK_TIME_SECONDS",
        "deadlock_time_seconds",
        _seconds_or_never,
        5.0,
        "seconds that all ranks may wait for different operations before that is an error; 0: never",
    ),
    Variable(
        "START_TIMEOUT",
        "start_timeout",
        _seconds,
        30.0,
        "seconds that ranks wait for each other in init()",
    ),
    Variable(
        "AS_GLOO",
        "as_gloo",
        _flag,
        False,
        '1: horoplug stands in for the backend "gloo" of torch.distributed; read at import torch',
    ),
    Variable("LOG_LEVEL", "log_level", _one_of(*LEVELS), "warning", "lowest level to log"),
    Variable("LOG_HIDE_TIME", "log_hide_time", _flag, False, "1: omit the time in log lines"),
    Variable(
        "ALGORITHM",
        "algorithm",
        _text,
        None,
        "forces the algorithm of this name wherever it can run",
    ),
    Variable(
        "HIERARCHICAL_ALLREDUCE",
        "hierarchical_allreduce",
        _flag,
        False,
        "1: allreduce GPU tensors within each host first; ALGORITHM takes precedence",
    ),
    Variable(
        "TIMELINE",
        "timeline",
        _text,
        None,
        "file for a timeline of the job; DYNAMIC: start it with start_timeline()",
    ),
    Variable(
        "TIMELINE_MARK_CYCLES",
        "timeline_mark_cycles",
        _flag,
        False,
        "1: mark rounds of negotiation in the timeline",
    ),
    Variable("RANK", "rank", _integer(0, 2**31 - 2), 0, "rank of this process"),
    Variable("SIZE", "size", _integer(1, 2**31 - 1), 1, "number of ranks in the job"),
    Variable("LOCAL_RANK", "local_rank", _integer(0), 0, "rank of this process on its host"),
    Variable("LOCAL_SIZE", "local_size", _integer(1), 1, "number of ranks on this host"),
    Variable(
        "CROSS_RANK",
        "cross_rank",
        _integer(0),
        0,
        "number of this host among the hosts that have this local rank",
    ),
    Variable(
        "CROSS_SIZE", "cross_size", _integer(1), 1, "number of hosts that have this local rank"
    ),
    Variable(
        "HOST_KEY",
        "hostname",
        _text,
        None,
        "only ranks with the same key share memory",
        aliases=("HOROPLUG_HOSTNAME", "HOROVOD_HOSTNAME"),
    ),
    Variable(
        "GLOO_RENDEZVOUS_ADDR", "rendezvous_addr", _text, None, "address of the rendezvous server"
    ),
    Variable(
        "GLOO_RENDEZVOUS_PORT",
        "rendezvous_port",
        _integer(1, 65535),
        None,
        "TCP port of the rendezvous server",
    ),
    Variable(
        "RENDEZVOUS_SERVER",
        "rendezvous_server",
        _one_of("launcher", "rank0"),
        "launcher",
        "rank0: rank 0 serves the rendezvous at that address",
    ),
    Variable(
        "SECRET_KEY",
        "secret_key",
        parse_secret,
        None,
        "the job's secret: 32 bytes as hex or base64",
        aliases=("_HOROVOD_SECRET_KEY",),
        private=True,
    ),
    Variable(
        "SECRET_FILE",
        "secret_file",
        _text,
        None,
        "a file with that secret, which only its owner can read; SECRET_KEY takes precedence",
    ),
    Variable(
        "CPU_OPERATIONS",
        "cpu_operations",
        _one_of("mpi", "gloo", "ccl"),
        None,
        "transport of data between hosts: mpi, gloo (TCP), or unset for the faster one",
    ),
    Variable(
        "CONTROLLER",
        "controller",
        _one_of("mpi", "gloo"),
        None,
        "mpi: require a job that mpirun has started; gloo: data goes over TCP unless CPU_OPERATIONS is set",
    ),
    Variable(
        "MPI_CUDA",
        "mpi_cuda",
        _flag,
        None,
        "1: MPI's nonblocking collectives accept NVIDIA GPU memory; 0: they do not; unset: ask MPI",
    ),
    Variable(
        "NUM_STREAMS",
        "num_streams",
        _integer(1, MAX_STREAMS),
        1,
        "connections between two ranks on different hosts",
    ),
    Variable(
        "CONNECT_ALL",
        "connect_all",
        _integer(0),
        64,
        "ranks up to which init connects every two; in larger jobs, ranks on different hosts connect on demand",
    ),
    Variable(
        "ENCRYPT",
        "encrypt",
        _flag,
        False,
        "1: all traffic between hosts is encrypted; init fails if that is not possible",
    ),
    Variable(
        "LIBCRYPTO",
        "libcrypto",
        _text,
        None,
        "file of OpenSSL's libcrypto, for ENCRYPT; unset: the loaded or the system's one",
    ),
    Variable("GLOO_IFACE", "gloo_iface", _text, None, "network interface to listen on"),
    Variable(
        "THREAD_AFFINITY",
        "thread_affinity",
        _cores,
        (),
        "CPU numbers; the one at index local_rank is for the progress thread",
    ),
    Variable(
        "THREAD_SHARE",
        "thread_share",
        _flag,
        True,
        "0: do not limit the compute threads of frameworks to the rank's share of its host's cores",
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
        "seconds between status reports of rank 0 to the launcher; 0: none",
    ),
    Variable(
        "ELASTIC",
        "elastic",
        _flag,
        False,
        "1: the number of ranks may change; a job of one rank then also reduces gradients through the core",
    ),
    Variable(
        "NOTICE_SIGNAL",
        "notice_signal",
        _signal,
        None,
        "signal by which a process of an elastic job is told to leave at the next commit, or horovodrun that the job "
        "has to end, such as SIGUSR1",
    ),
    Variable(
        "NOTICE_FILE",
        "notice_file",
        _text,
        None,
        "file whose existence tells the processes of an elastic job on its host to leave at the next commit",
    ),
    Variable(
        "SLOW_FACTOR",
        "slow_factor",
        _seconds_or_zero,
        2.0,
        "a process of an elastic job is slow if it computes for so many times as long as the others; 0: none is",
    ),
    Variable(
        "SLOW_SECONDS",
        "slow_seconds",
        _seconds,
        30.0,
        "seconds over which the processes of an elastic job are compared",
    ),
    Variable(
        "REQUEUE",
        "requeue",
        _flag,
        False,
        "1: horovodrun has Slurm requeue its job when an elastic job has ended because of NOTICE_SIGNAL",
    ),
    Variable(
        "ELASTIC_PROCESS",
        "elastic_process",
        _integer(0),
        None,
        "set by horovodrun in elastic jobs: the number of this process, which never changes",
    ),
    Variable(
        "SPARK_START_TIMEOUT",
        "spark_start_timeout",
        _seconds,
        600.0,
        "seconds that a job of horoplug.spark waits until Spark has started its tasks",
    ),
    Variable(
        "ELASTIC_TIMEOUT",
        "elastic_timeout",
        _seconds,
        600.0,
        "seconds that an elastic job waits for its smallest number of processes (horovodrun --elastic-timeout)",
    ),
)

# Variables of Horovod without a counterpart. Setting them must not break a job.
IGNORED: tuple[str, ...] = (
    "ADASUM_MPI_CHUNK_SIZE",
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    "BATCH_D2D_MEMCOPIES",
    "CCL_CACHE",
    "CYCLE_TIME",
    "DISABLE_NVTX_RANGES",
    "ENABLE_ASYNC_COMPLETION",
    "ENABLE_XLA_OPS",
    "HIERARCHICAL_ALLGATHER",
    "MPI_THREADS_DISABLE",
    "NUM_NCCL_STREAMS",
    "TORUS_ALLREDUCE",
)
# Settings that are not tuned if their variable is set, and the core's name for each (_native.Tunable).
TUNABLE: dict[str, str] = {
    "PLAN_BUCKET_SIZE": "BUCKETS",
    "NUM_STREAMS": "LANES",
    "ALGORITHM": "ALGORITHMS",
}
# Connections per pair of ranks with AUTOTUNE=1, so that tuning can choose how many to use.
TUNED_STREAMS = 4


# ---- reading --------------------------------------------------------------------------------------------------------


def name_in_use(variable: Variable, env: Mapping[str, str]) -> str | None:
    """The full name under which a variable is set, by precedence; None if it is unset."""
    return next((name for name in variable.names if env.get(name, "").strip()), None)


def read(variable: Variable, env: Mapping[str, str]) -> Any:
    """The value of a variable in an environment, or its default. Raises ValueError with one line of text."""
    name = name_in_use(variable, env)
    if name is None:
        return variable.default
    text = env[name]
    try:
        return variable.parse(text)
    except ValueError as error:
        shown = "(not shown)" if variable.private else repr(text)
        raise ValueError(f"{name}={shown} is wrong: it must be {error}") from None
