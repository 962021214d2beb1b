"""Jobs whose ranks have simulated GPUs (simulated_gpu.py)."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import horoplug as hvd
from tests.harness import simulated_gpu
from tests.harness.support import Pool


@functools.lru_cache(maxsize=1)
def device() -> simulated_gpu.Device:
    """This rank's device, created once in each process."""
    count = ctypes.c_int()
    driver = simulated_gpu.load()
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return simulated_gpu.Device(hvd.local_rank() % count.value)


@contextlib.contextmanager
def starter(make_folder: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """``start(hosts, devices, algorithm=None, **env)`` starts a job (see :meth:`support.Pool.ranks`). Jobs with the
    same number of GPUs share their processes. ``make_folder``: ``tmp_path_factory.mktemp``."""
    pools: dict[int, Pool] = {}
    with contextlib.ExitStack() as stack:

        def start(hosts: str, devices: int, algorithm: str | None = None, **env: str) -> Any:
            if devices not in pools:
                variables = simulated_gpu.environment(make_folder("gpus"), gpu_count=devices)
                pools[devices] = Pool(variables=variables)
                stack.callback(pools[devices].close)
            env |= {"HOROPLUG_ALGORITHM": algorithm} if algorithm else {}
            return pools[devices].ranks(len(hosts), hosts=hosts, env=env)

        yield start


def job_fixture() -> Any:
    """A fixture of a module that returns ``start`` of :func:`starter`."""

    @pytest.fixture(scope="module")
    def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
        with starter(tmp_path_factory.mktemp) as start:
            yield start

    return job


def device_ranks_fixture(jobs: dict[str, tuple[str, int, str | None]]) -> Any:
    """A fixture with a job of each kind in turn, started by the module's ``job``. ``jobs``: by name, the ranks by host,
    the number of GPUs, and the forced algorithm; None: horoplug chooses."""

    @pytest.fixture(params=jobs, scope="module")
    def ranks(request: pytest.FixtureRequest, job: Callable[..., Any]) -> Iterator[Any]:
        with job(*jobs[request.param]) as made:
            yield made

    return ranks
