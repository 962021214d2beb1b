"""``horovod.common.util``: odds and ends that programs use."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, TypeVar

from horoplug.common import basics

EXTENSIONS: Final = ["tensorflow", "torch", "mxnet"]
_PROVIDED: Final = ("torch",)

Item = TypeVar("Item")


# ---- what this installation has -------------------------------------------------------------------------------------
# Horovod asks a child process for each of these, because its extensions cannot be loaded side by side.


def get_ext_suffix() -> str:
    """How the file names of extension modules end."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Where Horovod would look for an extension: ``args`` relative to the folder of the file ``pkg_path``."""
    return os.path.join(os.path.dirname(pkg_path), *args) + get_ext_suffix()


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError if horoplug has no ``ext_name`` ("horovod.torch"). There is no extension that might be missing."""
    if ext_name.rpartition(".")[2] not in _PROVIDED:
        raise ImportError(f"horoplug does not provide {ext_name} yet")


def _cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: call the function once for the same (hashable) arguments, by position and by keyword."""
    known: dict[Hashable, Any] = {}

    @functools.wraps(function)
    def cached(*args: Any, **kwargs: Any) -> Any:
        key = args, frozenset(kwargs.items())
        if key not in known:
            known[key] = function(*args, **kwargs)
        return known[key]

    return cached


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether ``horovod.<ext_base_name>`` can be used: horoplug has it, and the framework is installed."""
    found = ext_base_name in _PROVIDED and importlib.util.find_spec(ext_base_name) is not None
    return _said(found, f"{ext_base_name} is available", verbose)


@_cache
def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework finds a CUDA or ROCm device. Looked up in a child, so that this process does not occupy
    it."""
    found = False
    if extension_available(ext_base_name):
        code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
        run = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        found = run.returncode == 0
    return _said(found, f"{ext_base_name} finds a GPU", verbose)


def _check_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """See :func:`horoplug.common.basics.mpi_built`; so for the following ones."""
    return _said(basics.mpi_built(), "MPI is built in", verbose)


def gloo_built(verbose: bool = False) -> bool:
    return _said(basics.gloo_built(), "Gloo is built in", verbose)


def nccl_built(verbose: bool = False) -> int:
    return _said(basics.nccl_built(), "NCCL is built in", verbose)


def ddl_built(verbose: bool = False) -> bool:
    return _said(basics.ddl_built(), "DDL is built in", verbose)


def ccl_built(verbose: bool = False) -> bool:
    return _said(basics.ccl_built(), "CCL is built in", verbose)


def _said(found: Item, what: str, verbose: bool) -> Item:
    if verbose:
        print(f"{what}: {'yes' if found else 'no'}")
    return found


def get_version_mismatch_message(name: str, version: str, installed_version: str | None) -> str:
    """What to tell about a framework that is not the one built for; horoplug is built for all."""
    return f"{name} is {version}, but was {installed_version} when the package was built."


def check_installed_version(
    name: str, version: str, exception: BaseException | None = None
) -> None:
    """Horovod compares a framework's version with the one it was built for; horoplug is built for none in
    particular."""


# ---- small tools ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Environment variables for the time of a ``with``. None: leave that one alone."""
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
    """``n`` parts of a list in order; if it does not divide, the first parts have one more."""
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
    """Whether version ``ver`` is ``target`` (major.minor.patch) or a newer one; releases come after their alphas,
    betas and candidates. Raises ValueError for anything but strings of that form."""
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions are strings, got {ver!r} and {target!r}.")
    if len(target.split(".")) != 3:
        raise ValueError(f"the version to compare with is major.minor.patch, got {target!r}.")
    return _version(ver) >= _version(target)


def _version(text: str) -> tuple[tuple[int, ...], bool]:
    """(numbers of the release without zeros at the end, whether it is final)."""
    match = re.match(
        r"v?(\d+(?:\.\d+)*)(?:[._-]?(?:a|b|c|rc|alpha|beta|pre|preview|dev)\d*)?", text
    )
    if match is None:
        raise ValueError(f"{text!r} is no version.")
    numbers = [int(number) for number in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), match.end() == match.end(1)


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[int | None, bool | None], int]:
    """A function of ``op`` and its deprecated predecessor ``average`` that gives the op (neither: Average).

    ``reduce_ops``: has Average and Sum. The function raises ValueError if both are given."""

    def resolve(op: int | None, average: bool | None) -> int:
        if op is not None and average is not None:
            raise ValueError("The op parameter supersedes average. Give only one of them.")
        if op is not None:
            return op
        if average is None:
            return reduce_ops.Average
        warnings.warn(
            "average= is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=2
        )
        return reduce_ops.Average if average else reduce_ops.Sum

    return resolve
