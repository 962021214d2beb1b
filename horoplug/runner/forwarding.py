"""Selects the variables of the launcher that ranks on other hosts get.

``horovodrun`` sends variables to any machine that answers under the name of a host. So it sends those that a training
program needs, and not the user's tokens and passwords: the list :data:`FORWARDED`, and what the user names (``-x``).
mpirun has rules of its own; for mpirun, :func:`exportable` only leaves out variables that are invalid on another
host."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple


class Family(NamedTuple):
    """Variables for one purpose, as patterns of their names."""

    purpose: str
    patterns: tuple[str, ...]


FORWARDED: Final = (
    Family("horoplug", ("HOROVOD_*", "HOROPLUG_*")),
    Family(
        "programs and libraries",
        (
            *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX"),
            *("CONDA_DEFAULT_ENV", "MODULEPATH", "LOADEDMODULES"),
        ),
    ),
    Family("language, time zone, terminal", ("LANG", "LANGUAGE", "LC_*", "TZ", "TERM", "NO_COLOR")),
    Family(
        "threads and memory",
        (
            *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "VECLIB_*"),
            *("ONEDNN_*", "DNNL_*", "NPROC", "PJRT_NPROC", "MALLOC_*", "GLIBC_TUNABLES"),
        ),
    ),
    Family("GPUs", ("CUDA_*", "CUDNN_*", "CUBLAS_*", "NVIDIA_TF32_OVERRIDE", "NCCL_*")),
    Family(
        "frameworks",
        (
            *("TORCH*", "PYTORCH_*", "TRITON_*", "TF_*", "TF2_*", "XLA_*", "JAX_*", "KERAS_*"),
            *("MXNET_*", "DMLC_*", "TOKENIZERS_PARALLELISM"),
        ),
    ),
    Family(
        "networks and MPI",
        (
            *("GLOO_*", "UCX_*", "FI_*", "IBV_*", "PSM2_*", "MPI4PY_*", "OMPI_MCA_*", "PMIX_MCA_*"),
            *("PRTE_MCA_*", "OPAL_PREFIX", "I_MPI_*", "MPICH_*"),
        ),
    ),
)
"""The whole list; docs/launch-ssh.md shows it."""

# Variables of a machine, a login or a desktop session, which are invalid on another host.
_WRONG_ELSEWHERE: Final = (
    *("BASH_FUNC_*", "OLDPWD", "_", "SHLVL"),
    *("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "PWD"),
    *("SSH_*", "SUDO_*", "XDG_*", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "XAUTHORITY"),
    *("WAYLAND_DISPLAY", "TMUX*", "STY", "WINDOWID", "KRB5CCNAME", "GPG_*"),
    "*CUDA_VISIBLE_DEVICES",
)
# Secrets with the prefix of a family. (TF_VAR_ and TF_TOKEN_ belong to Terraform.)
_SECRETS: Final = ("TF_VAR_*", "TF_TOKEN_*", "*_TOKEN", "*_PASSWORD", "*_API_KEY", "*_ACCESS_KEY")

NAMED: Final = "HOROPLUG_FORWARD"
"""A variable with names and patterns as those of ``-x``."""
EXCEPT: Final = "HOROPLUG_FORWARD_EXCEPT"
"""A variable with patterns of names that are not forwarded although the list has them."""


def forwarded(env: Mapping[str, str], also: Sequence[str] = ()) -> dict[str, str]:
    """The variables in ``env`` that ranks on other hosts get. ``also``: what ``-x`` names.

    A name in ``also``, or in the variable HOROPLUG_FORWARD, is forwarded in any case. A pattern there extends the
    list."""
    named = [*split(also), *split([env.get(NAMED, "")])]
    extended = [*named, *(pattern for family in FORWARDED for pattern in family.patterns)]
    left_out = (*_WRONG_ELSEWHERE, *split([env.get(EXCEPT, "")]))
    return {
        name: value
        for name, value in env.items()
        if name in named
        or (
            _matches(name, extended)
            and not _matches(name, left_out)
            and (_matches(name, named) or not _matches(name, _SECRETS))
        )
    }


def not_forwarded(env: Mapping[str, str], also: Sequence[str] = ()) -> list[str]:
    """The names of the variables in ``env`` that are not forwarded, without those that are invalid on another host."""
    return sorted(exportable(env).keys() - forwarded(env, also).keys())


def exportable(env: Mapping[str, str], also: Sequence[str] = ()) -> dict[str, str]:
    """The variables in ``env`` that are valid on another host, and those that ``also`` names."""
    left_out, named = (*_WRONG_ELSEWHERE, *split([env.get(EXCEPT, "")])), split(also)
    return {
        name: value for name, value in env.items() if name in named or not _matches(name, left_out)
    }


def split(texts: Iterable[str]) -> list[str]:
    """The names and patterns in texts that separate them by commas."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
