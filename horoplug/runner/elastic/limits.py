"""The limits of an elastic job, with the time limits of the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping

from horoplug.base import config

from .roster import Limits

_REACTION_SECONDS = 5.0  # for a process to restore its state after it has learned of a failure


def make_limits(
    minimum: int,
    maximum: int,
    *,
    wait: float | None = None,
    resets: int | None = None,
    hosts_may_come: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Limits:
    """The limits of a job with the time limits of the configuration. ``wait``: seconds that the job waits for the
    smallest number of processes, None: HOROVOD_ELASTIC_TIMEOUT; ``environment``: the variables that have the
    configuration. The other arguments are those of :class:`.roster.Limits`.

    Errors: ValueError for an invalid variable or a wrong number."""
    if not 1 <= minimum <= maximum:
        raise ValueError(
            f"an elastic job has at least 1 process and at most as many as it may have, not {minimum} to {maximum}"
        )
    return Limits(
        minimum,
        maximum,
        wait=config.value("ELASTIC_TIMEOUT", environment) if wait is None else wait,
        resets=resets,
        gather=config.value("GLOO_TIMEOUT_SECONDS", environment) + _REACTION_SECONDS,
        start=config.value("START_TIMEOUT", environment),
        hosts_may_come=hosts_may_come,
    )
