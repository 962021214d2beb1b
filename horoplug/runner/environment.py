"""What the ranks are told, as environment variables."""

from __future__ import annotations

import base64
import fnmatch
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

# What belongs to a machine, a login or a desktop session, and means nothing, or something else, on another host.
_STAYS = (
    *("BASH_FUNC_*", "OLDPWD", "_", "SHLVL"),
    *("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "PWD"),
    *("SSH_*", "SUDO_*", "XDG_*", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "XAUTHORITY"),
    *("WAYLAND_DISPLAY", "TMUX*", "STY", "WINDOWID", "KRB5CCNAME", "GPG_*"),
    "*CUDA_VISIBLE_DEVICES",
)
EXCEPT = "HOROPLUG_FORWARD_EXCEPT"  # patterns of further names, separated by commas


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """The part of the launcher's environment that ranks on other hosts get."""
    more = [pattern.strip() for pattern in env.get(EXCEPT, "").split(",") if pattern.strip()]
    return {
        name: value
        for name, value in env.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in (*_STAYS, *more))
    }


def set_variable(env: dict[str, str], name: str, value: str) -> None:
    """Set ``HOROVOD_<name>`` and remove its stronger twin."""
    env.pop(f"HOROPLUG_{name}", None)
    env[f"HOROVOD_{name}"] = value


def common_environment(
    outer: Mapping[str, str], settings: Mapping[str, str], *, compat: bool = False
) -> dict[str, str]:
    """What does not depend on where ranks run. ``outer``: the launcher's environment, or its part for a host;
    ``settings``: from its flags, without prefix; ``compat``: horovod is to mean horoplug (:mod:`horoplug.compat`)."""
    env = dict(outer)
    for name in DECIDED:
        env.pop(f"HOROPLUG_{name}", None)
        env.pop(f"HOROVOD_{name}", None)
    for name, value in settings.items():
        set_variable(env, name, value)
    env["HOROVOD_CONTROLLER"] = env["HOROVOD_CPU_OPERATIONS"] = "gloo"
    env["PYTHONUNBUFFERED"] = "1"  # so that lines arrive when they are printed
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
    """What all ranks of a host share. ``host``: its name, if there are several; ``interface``: where they listen."""
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


def rank_environment(rank: int, place: Mapping[str, str]) -> dict[str, str]:
    """What is this rank's alone. ``place``: its local and cross numbers, without prefix."""
    return {"HOROVOD_RANK": str(rank)} | {f"HOROVOD_{name}": text for name, text in place.items()}
