"""Jobs whose ranks have simulated cards (simulated_gpu.py)."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import simulated_gpu
from support import Pool

import horoplug as hvd


@functools.lru_cache(maxsize=1)
def card() -> simulated_gpu.Card:
    """This rank's; each process has it once."""
    count = ctypes.c_int()
    driver = simulated_gpu.load()
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return simulated_gpu.Card(hvd.local_rank() % count.value)


@contextlib.contextmanager
def starter(make_folder: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """``start(hosts, cards, algorithm=None, **env)`` starts a job (see :meth:`support.Pool.ranks`), for each number of
    cards with the same processes. ``make_folder``: ``tmp_path_factory.mktemp``."""
    pools: dict[int, Pool] = {}
    with contextlib.ExitStack() as stack:

        def start(hosts: str, cards: int, algorithm: str | None = None, **env: str) -> Any:
            if cards not in pools:
                variables = simulated_gpu.environment(make_folder("cards"), card_count=cards)
                pools[cards] = Pool(variables=variables)
                stack.callback(pools[cards].close)
            env |= {"HOROPLUG_ALGORITHM": algorithm} if algorithm else {}
            return pools[cards].ranks(len(hosts), hosts=hosts, env=env)

        yield start
