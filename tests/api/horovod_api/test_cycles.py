"""Hundreds of jobs in one process, one for each test, leak no descriptors, threads or memory."""

import os
import threading

import horovod.torch as hvd
import pytest
import torch

CYCLES = 300
WARM_UP = 20  # cycles until caches, pools and lazily created threads exist


def open_files():
    return len(os.listdir("/proc/self/fd"))


def threads():
    """The number of threads: the minimum over a short time, since the kernel may still list a joined thread."""
    alone = threading.active_count()
    for _ in range(10_000):
        found = len(os.listdir("/proc/self/task"))
        if found <= alone:
            break
        os.sched_yield()
    return found


def resident_kib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def mappings():
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


MEASURES = {"files": open_files, "threads": threads, "KiB": resident_kib, "mappings": mappings}
after = {}  # by cycle


@pytest.mark.no_job
@pytest.mark.parametrize("number", range(CYCLES))
def test_init_and_shutdown_cycle(number):
    hvd.init()
    output = hvd.allreduce(torch.full((1000,), float(number)), op=hvd.Sum)
    assert output[0] == number * hvd.size()
    hvd.shutdown()
    after[number] = {name: measure() for name, measure in MEASURES.items()}


@pytest.mark.no_job
def test_cycles_leak_no_resources():
    first, last = after[WARM_UP], after[CYCLES - 1]
    assert last["files"] <= first["files"]
    assert last["threads"] <= first["threads"]
    assert last["mappings"] <= first["mappings"] + 20
    # pytest itself keeps a few KiB for each test it has run.
    assert last["KiB"] - first["KiB"] < 40 * (CYCLES - WARM_UP)
    assert threading.active_count() == 1
