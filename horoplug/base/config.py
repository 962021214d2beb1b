"""The configuration of a process: the frozen result of reading the variables of :mod:`horoplug.base.variables`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from horoplug.base.log import LEVELS
from horoplug.base.secret_file import read_secret_file
from horoplug.base.variables import (
    IGNORED,
    MIB,
    TUNABLE,
    TUNED_STREAMS,
    VARIABLES,
    name_in_use,
    read,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration. Times are in seconds, sizes in bytes; -1 is the core's "off" or "never"."""

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
    """Variables of :data:`TUNABLE` that the environment sets; their settings are not tuned."""
    stall_check_time_seconds: float = 60.0
    stall_shutdown_time_seconds: float = 0.0
    gloo_timeout_seconds: float = 30.0
    operation_timeout_seconds: float = 1800.0
    deadlock_time_seconds: float = 5.0
    start_timeout: float = 30.0
    as_gloo: bool = False
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
    """The value of ``SECRET_KEY``, else the content of ``secret_file``."""
    secret_file: str | None = None
    cpu_operations: str | None = None
    controller: str | None = None
    mpi_cuda: bool | None = None
    num_streams: int = 1
    connect_all: int = 64
    gloo_iface: str | None = None
    thread_affinity: tuple[int, ...] = ()
    thread_share: bool = True
    dynamic_process_sets: bool = False
    status_seconds: float = 0.0
    elastic: bool = False
    notice_signal: int | None = None
    notice_file: str | None = None
    slow_factor: float = 2.0
    slow_seconds: float = 30.0
    requeue: bool = False
    elastic_process: int | None = None
    elastic_timeout: float = 600.0
    spark_start_timeout: float = 600.0
    encrypt: bool = False
    libcrypto: str | None = None
    notes: tuple[tuple[int, str], ...] = ()
    """Remarks about the environment, (logging level, text), for :meth:`log_notes`."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """Read ``env``, by default the process's environment. Raises ValueError with one line of text."""
        env = os.environ if env is None else env
        values = {variable.field: read(variable, env) for variable in VARIABLES}
        if values["secret_key"] is None and values["secret_file"]:
            values["secret_key"] = read_secret(values["secret_file"])
        values["autotune_fixed"] = fixed = tuple(
            variable.name
            for variable in VARIABLES
            if variable.name in TUNABLE and name_in_use(variable, env)
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
        """The algorithm that is forced for GPU tensors; None: ``algorithm`` applies to them as well."""
        return "hierarchical" if self.hierarchical_allreduce and self.algorithm is None else None

    @property
    def core_autotune(self) -> tuple[int, int, int, int, int, str]:
        """The core's tuning settings: mode, bits of fixed settings, warm-up steps, timed steps, samples, log file."""
        from horoplug._native import Tunable  # the launcher works without the core

        modes = {None: 0, True: 1, False: -1}
        return (
            modes[self.autotune],
            sum(Tunable[TUNABLE[name]] for name in self.autotune_fixed),
            self.autotune_warmup_samples,
            self.autotune_steps_per_sample,
            self.autotune_max_samples,
            (self.autotune_log or "") if self.rank == 0 else "",
        )

    @property
    def core_log_level(self) -> int:
        """The core's log level. It has no number for trace, since its 0 means the default."""
        return max(1, LEVELS.index(self.log_level))

    def log_notes(self, logger: logging.Logger) -> None:
        """Log the remarks, one line each. Call it after the logger has been configured."""
        for level, text in self.notes:
            logger.log(level, "%s", text)


def value(name: str, env: Mapping[str, str] | None = None) -> Any:
    """The value of one variable of the table in ``env``, by default the process's environment.

    ``name``: without prefix. For variables that are read after ``init``, or before the process has a rank. Raises
    ValueError with one line of text."""
    return read(next(v for v in VARIABLES if v.name == name), os.environ if env is None else env)


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
