"""What the ranks are told, as environment variables."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from horoplug.compat import python_path

# The launcher decides these. A HOROPLUG_ variable that was left over from elsewhere would win over what it sets.
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
)


def set_variable(env: dict[str, str], name: str, value: str) -> None:
    """Set ``HOROVOD_<name>`` and remove its stronger twin."""
    env.pop(f"HOROPLUG_{name}", None)
    env[f"HOROVOD_{name}"] = value


def job_environment(
    outer: Mapping[str, str],
    settings: Mapping[str, str],
    *,
    size: int,
    server: tuple[str, int],
    secret: bytes,
    compat: bool = False,
) -> dict[str, str]:
    """What all ranks share. ``outer``: the launcher's environment; ``settings``: from its flags, without prefix;
    ``compat``: horovod is to mean horoplug (:mod:`horoplug.compat`)."""
    env = dict(outer)
    for name in DECIDED:
        env.pop(f"HOROPLUG_{name}", None)
        env.pop(f"HOROVOD_{name}", None)
    for name, value in settings.items():
        set_variable(env, name, value)
    env["HOROVOD_SIZE"] = env["HOROVOD_LOCAL_SIZE"] = str(size)
    env["HOROVOD_CROSS_RANK"], env["HOROVOD_CROSS_SIZE"] = "0", "1"
    env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = server[0]
    env["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(server[1])
    env["_HOROVOD_SECRET_KEY"] = base64.b64encode(secret).decode()
    env["HOROVOD_CONTROLLER"] = env["HOROVOD_CPU_OPERATIONS"] = "gloo"
    env.setdefault("HOROVOD_HOSTNAME", "localhost")
    env["PYTHONUNBUFFERED"] = "1"  # so that lines arrive when they are printed
    if compat:
        env["PYTHONPATH"] = python_path(env)
    return env


def rank_environment(rank: int) -> dict[str, str]:
    """What is this rank's alone."""
    return {"HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)}
