"""The configuration of a process: the table of all environment variables, and the frozen result of reading them."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from horoplug.base.core_settings import CoreSettings
from horoplug.base.log import LEVELS
from horoplug.base.secret_file import read_secret_file
from horoplug.base.variables import (
    IGNORED,
    MAX_STREAMS,
    TUNABLE,
    TUNED_STREAMS,
    cores,
    flag,
    integer,
    name_in_use,
    one_of,
    parse_secret,
    read,
    seconds,
    seconds_or_zero,
    signal_number,
    text,
    variable,
    variables_of,
)


@dataclasses.dataclass(frozen=True)
class Config(CoreSettings):
    """The configuration: the settings of the core, those of Python and of launchers, and what follows from them. Times
    are in seconds, and 0 means never where there is a choice; sizes are in bytes."""

    # fmt: off
    stall_check_disable: bool = variable("STALL_CHECK_DISABLE", flag, False, "1: stalled tensors are not reported")
    start_timeout: float = variable("START_TIMEOUT", seconds, 30.0,
        "seconds that ranks wait for each other in `init()`")
    start_timeout_set_by: str | None = variable("START_TIMEOUT_SET_BY", text, None,
        "set by launchers: what messages call `START_TIMEOUT`")
    as_gloo: bool = variable("AS_GLOO", flag, False,
        "1: horoplug [stands in for Gloo](torch-distributed.md#in-place-of-gloo) in `torch.distributed`; read at "
        "`import torch`")
    log_level: str = variable("LOG_LEVEL", one_of(*LEVELS), "warning", "trace, debug, info, warning, error or fatal")
    log_hide_time: bool = variable("LOG_HIDE_TIME", flag, False, "1: no time in log lines")
    hierarchical_allreduce: bool = variable("HIERARCHICAL_ALLREDUCE", flag, False,
        "1: allreduces of [GPU](gpu.md) tensors run within each host first; `ALGORITHM` takes precedence")
    timeline: str | None = variable("TIMELINE", text, None,
        "file for a [timeline](timeline.md); `DYNAMIC`: none before `start_timeline()`")
    timeline_mark_cycles: bool = variable("TIMELINE_MARK_CYCLES", flag, False,
        "1: the timeline marks rounds of negotiation")
    rank: int = variable("RANK", integer(0, 2**31 - 2), 0, "number of this process")
    size: int = variable("SIZE", integer(1, 2**31 - 1), 1, "number of processes")
    local_rank: int = variable("LOCAL_RANK", integer(0), 0, "number of this process on its host")
    local_size: int = variable("LOCAL_SIZE", integer(1), 1, "number of processes on this host")
    cross_rank: int = variable("CROSS_RANK", integer(0), 0,
        "number of this host among those that have this local rank")
    cross_size: int = variable("CROSS_SIZE", integer(1), 1, "number of hosts that have this local rank")
    hostname: str | None = variable("HOST_KEY", text, None,
        "ranks with the same value are on one host and share memory; by default the host's identity",
        aliases=("HOROPLUG_HOSTNAME", "HOROVOD_HOSTNAME"))
    rendezvous_addr: str | None = variable("GLOO_RENDEZVOUS_ADDR", text, None, "address of the rendezvous server")
    rendezvous_port: int | None = variable("GLOO_RENDEZVOUS_PORT", integer(1, 65535), None,
        "TCP port of the rendezvous server")
    rendezvous_server: str = variable("RENDEZVOUS_SERVER", one_of("launcher", "rank0"), "launcher",
        "`rank0`: rank 0 serves the rendezvous at that address")
    secret_key: bytes | None = variable("SECRET_KEY", parse_secret, None,
        "the job's secret: 32 bytes as hex or base64", aliases=("_HOROVOD_SECRET_KEY",), private=True)
    secret_file: str | None = variable("SECRET_FILE", text, None,
        "a file with that secret, which only its owner can read; `SECRET_KEY` takes precedence")
    cpu_operations: str | None = variable("CPU_OPERATIONS", one_of("mpi", "gloo", "ccl"), None,
        "`mpi`: data between hosts goes over [MPI](mpi.md); `gloo`: over TCP; unset: over the faster one")
    controller: str | None = variable("CONTROLLER", one_of("mpi", "gloo"), None,
        "`mpi`: `mpirun` must have started the job; `gloo`: data goes over TCP unless `CPU_OPERATIONS` is set")
    mpi_cuda: bool | None = variable("MPI_CUDA", flag, None,
        "1: MPI's nonblocking collectives accept [GPU memory](gpu.md); 0: never give it to MPI; unset: ask MPI")
    num_streams: int = variable("NUM_STREAMS", integer(1, MAX_STREAMS), 1,
        "connections between two ranks on different hosts; more than one helps where a single connection does not "
        "fill the link")
    connect_all: int = variable("CONNECT_ALL", integer(0), 64,
        "jobs of at most so many ranks connect every two ranks in `init()`; in larger ones, most ranks on different "
        "hosts are connected when they first exchange data; the same on all ranks")
    encrypt: bool = variable("ENCRYPT", flag, False,
        "1: all traffic between hosts is [encrypted](../SECURITY.md#encryption), or `init()` fails; the same on all "
        "ranks")
    libcrypto: str | None = variable("LIBCRYPTO", text, None,
        "file of OpenSSL's libcrypto, for `ENCRYPT`; unset: a loaded one, Python's, or the system's")
    gloo_iface: str | None = variable("GLOO_IFACE", text, None,
        "network interface to listen on; several names, separated by commas, if hosts use different names")
    thread_affinity: tuple[int, ...] = variable("THREAD_AFFINITY", cores, (),
        "list of CPU numbers; the progress thread of a rank runs on the CPU at index local rank")
    thread_share: bool = variable("THREAD_SHARE", flag, True,
        "0: do not limit the compute threads of frameworks to the rank's [share of its host's "
        "cores](horovodrun.md#threads-of-each-rank), and do not compare them under other launchers")
    direct_calls: bool = variable("DIRECT_CALLS", flag, True,
        "0: no operation takes the [short way](design/bindings.md#direct-calls) from Python to the core, which gives "
        "the same results")
    dynamic_process_sets: bool = variable("DYNAMIC_PROCESS_SETS", flag, False,
        "accepted; process sets can always be added and removed")
    status_seconds: float = variable("STATUS_SECONDS", seconds_or_zero, 0.0,
        "interval at which rank 0 reports to the launcher; 0: never (`horovodrun` sets it on a terminal)")
    elastic: bool = variable("ELASTIC", flag, False, "1: the number of ranks may change")
    notice_signal: int | None = variable("NOTICE_SIGNAL", signal_number, None,
        "signal by which a process of an [elastic job](elastic.md#notice) is told to leave at the next commit, or "
        "`horovodrun` that the job has to end, such as `SIGUSR1`")
    notice_file: str | None = variable("NOTICE_FILE", text, None,
        "file whose existence tells the processes of an [elastic job](elastic.md#notice) on its host to leave at the "
        "next commit")
    slow_factor: float = variable("SLOW_FACTOR", seconds_or_zero, 2.0,
        "a process of an [elastic job](elastic.md#slow-processes) is reported as slow if it computes for so many "
        "times as long as the others; 0: none is")
    slow_seconds: float = variable("SLOW_SECONDS", seconds, 30.0,
        "seconds over which the processes of an elastic job are compared")
    requeue: bool = variable("REQUEUE", flag, False,
        "1: `horovodrun` has Slurm run its job again after the job has ended because of `NOTICE_SIGNAL`")
    elastic_process: int | None = variable("ELASTIC_PROCESS", integer(0), None,
        "set by `horovodrun` in elastic jobs: the number of the process, which never changes")
    spark_start_timeout: float = variable("SPARK_START_TIMEOUT", seconds, 600.0,
        "seconds that a job of [horoplug.spark](spark.md) waits until Spark has started its tasks")
    elastic_timeout: float = variable("ELASTIC_TIMEOUT", seconds, 600.0,
        "seconds that an [elastic job](elastic.md) waits for its smallest number of processes")
    # fmt: on
    autotune_fixed: tuple[str, ...] = ()
    """Variables of :data:`TUNABLE` that the environment sets; their settings are not tuned."""
    notes: tuple[tuple[int, str], ...] = ()
    """Remarks about the environment, (logging level, text), for :meth:`log_notes`."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """Read ``env``, by default the process's environment. Raises ValueError with one line of text."""
        env = os.environ if env is None else env
        values = {each.field: read(each, env) for each in VARIABLES}
        if values["secret_key"] is None and values["secret_file"]:
            values["secret_key"] = read_secret(values["secret_file"])
        values["autotune_fixed"] = fixed = tuple(
            each.name for each in VARIABLES if each.name in TUNABLE and name_in_use(each, env)
        )
        if values["autotune"] and "NUM_STREAMS" not in fixed:
            values["num_streams"] = TUNED_STREAMS
        notes: list[tuple[int, str]] = []
        ignored = [name for name in map(_ignored(env), IGNORED) if name]
        if ignored:
            notes.append((logging.INFO, "without effect in horoplug: " + ", ".join(ignored)))
        if values["cpu_operations"] == "ccl":
            notes.append(
                (logging.INFO, "horoplug does not use oneCCL (HOROVOD_CPU_OPERATIONS=ccl)")
            )
        if values["stall_check_disable"]:
            values["stall_check_time"] = 0.0
        if 0 < values["stall_shutdown_time"] < values["stall_check_time"]:
            notes.append(
                (
                    logging.WARNING,
                    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is ignored, because it is smaller than "
                    "HOROVOD_STALL_CHECK_TIME_SECONDS",
                )
            )
            values["stall_shutdown_time"] = 0.0
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
        """The algorithm that is forced for GPU tensors; None: ``algorithm`` applies to them as well."""
        return "hierarchical" if self.hierarchical_allreduce and self.algorithm is None else None

    @property
    def core(self) -> dict[str, Any]:
        """The settings of the core by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(CoreSettings)}

    def log_notes(self, logger: logging.Logger) -> None:
        """Log the remarks, one line each. Call it after the logger has been configured."""
        for level, note in self.notes:
            logger.log(level, "%s", note)


VARIABLES = variables_of(Config)
"""The table of all environment variables that horoplug reads, and the core does not read itself."""


def value(name: str, env: Mapping[str, str] | None = None) -> Any:
    """The value of one variable of the table in ``env``, by default the process's environment.

    ``name``: without prefix. For variables that are read after ``init``, or before the process has a rank. Raises
    ValueError with one line of text."""
    return read(
        next(each for each in VARIABLES if each.name == name), os.environ if env is None else env
    )


def read_secret(path: str) -> bytes:
    """The content of the file that ``SECRET_FILE`` names. Errors: ValueError with a one-line message."""
    try:
        remedy = "HOROPLUG_SECRET_FILE needs a file that only its owner can read, with 64 hexadecimal digits"
        return read_secret_file(path, remedy, provided=True)
    except OSError as error:
        raise ValueError(f"HOROPLUG_SECRET_FILE={path}: {error.strerror}") from None


def _ignored(env: Mapping[str, str]) -> Callable[[str], str]:
    """A function that returns the full name under which a variable (named without prefix) is set, or ''."""

    def find(name: str) -> str:
        for full in (f"HOROPLUG_{name}", f"HOROVOD_{name}"):
            if env.get(full, "").strip():
                return full
        return ""

    return find
