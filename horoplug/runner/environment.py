"""The environment variables of the ranks."""

from __future__ import annotations

import base64
from collections.abc import Mapping, MutableMapping

from horoplug.base import config, thread_share
from horoplug.compat import python_path

# Variables that the launcher sets. Inherited ones with the prefix HOROPLUG_ are removed, as they would take precedence.
DECIDED = (
    "RANK",
    "SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "GLOO_RENDEZVOUS_ADDR",
    "GLOO_RENDEZVOUS_PORT",
    "RENDEZVOUS_SERVER",
    "SECRET_KEY",
    "CONTROLLER",
    "CPU_OPERATIONS",
    "ELASTIC_PROCESS",
    "RESTART_COUNT",
)


def set_variable(env: dict[str, str], name: str, value: str) -> None:
    """Set ``HOROVOD_<name>``, and remove ``HOROPLUG_<name>``, which would take precedence."""
    env.pop(f"HOROPLUG_{name}", None)
    env[f"HOROVOD_{name}"] = value


def common_environment(
    outer: Mapping[str, str], settings: Mapping[str, str], *, compat: bool = False
) -> dict[str, str]:
    """The variables that do not depend on the rank.

    ``outer``: the launcher's environment, or for another host its forwarded part; ``settings``: variables that flags
    set, without prefix; ``compat``: ``import horovod`` imports horoplug (:mod:`horoplug.compat`)."""
    env = dict(outer)
    if "HOROPLUG_ELASTIC_PROCESS" in env:  # of an elastic job that has started this launcher
        env.pop("HOROVOD_ELASTIC", None)
    for name in DECIDED:
        env.pop(f"HOROPLUG_{name}", None)
        env.pop(f"HOROVOD_{name}", None)
    for name in (thread_share.RANKS, thread_share.GIVEN):  # of a job that has started this launcher
        env.pop(name, None)
    for name, value in settings.items():
        set_variable(env, name, value)
    env["HOROVOD_CONTROLLER"] = env["HOROVOD_CPU_OPERATIONS"] = "gloo"
    env["PYTHONUNBUFFERED"] = "1"  # so that output arrives immediately
    if compat:
        env["PYTHONPATH"] = python_path(env)
    return env


def job_environment(
    common: Mapping[str, str],
    *,
    size: int,
    server: tuple[str, int],
    secret: bytes,
    host: str | None = None,
    interface: str | None = None,
) -> dict[str, str]:
    """The variables of all ranks on one host.

    ``server``: the rendezvous's address and port; ``host``: the host's name if there are several hosts; ``interface``:
    the network interface on which the ranks listen, None: any."""
    env = dict(common)
    env["HOROVOD_SIZE"] = str(size)
    env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = server[0]
    env["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(server[1])
    env["_HOROVOD_SECRET_KEY"] = base64.b64encode(secret).decode()
    if host is not None:
        env.pop("HOROPLUG_HOSTNAME", None)
        env["HOROVOD_HOSTNAME"] = host
    env.setdefault("HOROVOD_HOSTNAME", "localhost")
    if interface is not None:
        set_variable(env, "GLOO_IFACE", interface)
    return env


def rank_environment(rank: int, numbers: Mapping[str, str]) -> dict[str, str]:
    """The variables of one rank. ``numbers``: its local and cross ranks and sizes, by name without prefix."""
    own = {f"HOROVOD_{name}": text for name, text in numbers.items()}
    return {"HOROVOD_RANK": str(rank), thread_share.RANKS: numbers["LOCAL_SIZE"]} | own


def elastic_environment(
    process: int, slot: int, local_slot: int, restarts: int, size: int, ranks_of_host: int
) -> dict[str, str]:
    """The variables of one process of an elastic job. Its rank is only known in ``init()``. Programs that read the
    variables before, for example to choose a GPU, find numbers that no other live process has.

    ``slot``: unique among the live processes; ``local_slot``: among those of its host; ``restarts``: how often the job
    has been formed again after failures; ``size``: the number of live processes; ``ranks_of_host``: how many the host
    may have, by which its processors are shared until ``init()`` knows the membership."""
    size = max(size, slot + 1)
    return {
        "HOROVOD_RANK": str(slot),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local_slot),
        "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_ELASTIC": "1",
        "HOROPLUG_ELASTIC_PROCESS": str(process),
        "HOROPLUG_RESTART_COUNT": str(restarts),
        thread_share.RANKS: str(ranks_of_host),
    }


def shares_threads(env: Mapping[str, str]) -> bool:
    """Whether the ranks' threads are limited. Errors: ValueError for an invalid variable."""
    return bool(config.value("THREAD_SHARE", env))


def give_threads(env: MutableMapping[str, str]) -> None:
    """Limit the threads of a rank that is about to start on this host (:mod:`horoplug.base.thread_share`). ``env``: its
    variables. Errors: ValueError for an invalid variable."""
    if not shares_threads(env):
        env.pop(thread_share.RANKS, None)
    thread_share.give(env)
