"""``horovod.common.util``: helper functions that programs use."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from packaging.version import Version

from horoplug.common import basics
from horoplug.common.reduce_ops import resolve

EXTENSIONS: Final = ["tensorflow", "torch", "mxnet"]
_GPU_CHECKS: Final = {
    "torch": "import torch as f; found = f.cuda.is_available()",
    "tensorflow": "import tensorflow as f; found = f.config.list_physical_devices('GPU')",
    "keras": "import tensorflow as f; found = f.config.list_physical_devices('GPU')",
    "mxnet": "import mxnet as f; found = f.context.num_gpus() > 0",
    "jax": "import jax as f; found = any(d.platform == 'gpu' for d in f.devices())",
}
"""By the frameworks that horoplug provides: a program that finds a GPU."""
_GPU_SECONDS: Final = 300.0  # limit for a framework to look for a device

Item = TypeVar("Item")


# ---- what this installation has -------------------------------------------------------------------------------------
# Horovod runs these checks in child processes, since its extensions cannot be loaded into one process.


def get_ext_suffix() -> str:
    """The file name suffix of extension modules."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """The path at which Horovod would look for an extension: ``args`` relative to the folder of ``pkg_path``."""
    return os.path.join(os.path.dirname(pkg_path), *args) + get_ext_suffix()


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError if horoplug has no ``ext_name`` ("horovod.torch"). horoplug needs no extension for it."""
    if ext_name.rpartition(".")[2] not in _GPU_CHECKS:
        raise ImportError(f"horoplug does not provide {ext_name} yet")


_cache = functools.cache


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether horoplug has ``horovod.<ext_base_name>`` and the framework is installed."""
    found = ext_base_name in _GPU_CHECKS and importlib.util.find_spec(ext_base_name) is not None
    return _report(found, f"{ext_base_name} is available", verbose)


@_cache
def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework finds a CUDA or ROCm device. Checked in a child process, so that this process does not
    initialise the device."""
    found = False
    if extension_available(ext_base_name):
        code = f"import sys; {_GPU_CHECKS[ext_base_name]}; sys.exit(0 if found else 3)"
        # A device that does not answer is none.
        with contextlib.suppress(subprocess.TimeoutExpired):
            run = subprocess.run(
                [sys.executable, "-c", code],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_GPU_SECONDS,
            )
            found = run.returncode == 0
    return _report(found, f"{ext_base_name} finds a GPU", verbose)


def _check_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """See :func:`horoplug.common.basics.mpi_built`; likewise for the following functions."""
    return _report(basics.mpi_built(), "MPI is built in", verbose)


def gloo_built(verbose: bool = False) -> bool:
    return _report(basics.gloo_built(), "Gloo is built in", verbose)


def nccl_built(verbose: bool = False) -> int:
    return _report(basics.nccl_built(), "NCCL is built in", verbose)


def ddl_built(verbose: bool = False) -> bool:
    return _report(basics.ddl_built(), "DDL is built in", verbose)


def ccl_built(verbose: bool = False) -> bool:
    return _report(basics.ccl_built(), "CCL is built in", verbose)


def _report(found: Item, what: str, verbose: bool) -> Item:
    if verbose:
        print(f"{what}: {'yes' if found else 'no'}")
    return found


def get_version_mismatch_message(name: str, version: str, installed_version: str | None) -> str:
    """The message for a framework whose version is not the one that Horovod was built for."""
    return f"{name} is {version}, but was {installed_version} when the package was built"


def check_installed_version(
    name: str, version: str, exception: BaseException | None = None
) -> None:
    """Does nothing: unlike Horovod, horoplug is not built for a particular version of a framework."""


# ---- small tools ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables within a ``with`` block; None leaves a variable unchanged."""
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(l: Sequence[Item], n: int) -> list[Sequence[Item]]:  # noqa: E741
    """Split a list into ``n`` consecutive parts; the first parts have one item more if ``n`` does not divide it."""
    least, more = divmod(len(l), n)
    ends = [part * least + min(part, more) for part in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(ends)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank.bit_count() == 1


def is_iterable(x: Any) -> bool:
    """Whether ``iter(x)`` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


@_cache
def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version ``ver`` is at least ``target`` (major.minor.patch). Pre-releases precede their release.

    Raises ValueError for arguments that are not strings of that form."""
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions are strings, got {ver!r} and {target!r}")
    if len(target.split(".")) != 3:
        raise ValueError(f"the version to compare with is major.minor.patch, got {target!r}")
    return Version(ver) >= Version(target)


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[int | None, bool | None], int]:
    """:func:`horoplug.common.reduce_ops.resolve`, whatever module of reductions ``reduce_ops`` is."""
    return resolve
