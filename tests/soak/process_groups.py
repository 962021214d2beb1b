"""Random mismatches of ``torch.distributed`` for HOROPLUG_SOAK_SECONDS seconds: a part of `make soak`.

The ranks of a job call different operations, in random ways and after idle phases; each gets an error that names both
sides, and the group goes on. Between them, late ranks get no error. At the end of some jobs a rank is killed or
stopped, in the middle of idling too, and all others get an error that names it."""

import collections
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.mismatched_calls import OTHERS, PAIRS, WAYS, is_named, mismatched
from tests.harness.process_groups import begin, end, new_file
from tests.harness.support import Pool, Ranks, seed

SECONDS = float(os.environ.get("HOROPLUG_SOAK_SECONDS", "60"))
LIMIT = 300.0  # seconds for a part of a job
DEADLOCK_TIME = 1.0
GROUP_TIMEOUT = 20.0
# What a stopped rank may take longer than the group's timeout to be named, on a busy machine. Less than LONG_IDLE, so
# that idle time which counts is found.
LATENESS = 20.0
LONG_IDLE = 30.0


@pytest.fixture
def pool() -> Iterator[Pool]:
    # DDP imports torch._dynamo in its first use, which takes many seconds on a busy machine.
    pool = Pool(modules=["torch", "torch._dynamo", "horoplug.torch"])
    yield pool
    pool.close()


def idle_then(seconds: float, number: int) -> bool:
    """All ranks rest; one is late, which is no mismatch."""
    time.sleep(seconds)
    tensor = torch.ones(3)
    if dist.get_rank() == number % dist.get_world_size():
        time.sleep(2 * DEADLOCK_TIME)
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future().wait()
    return bool((tensor == dist.get_world_size()).all())


def until_failure(way: str, seconds: float, victim: int, fault: int) -> str:
    """The error of this rank when another one is killed or stopped after idling. Some steps of all ranks come before,
    so that the operations are planned."""
    wait = WAYS[way]()
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    time.sleep(seconds)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), fault)
    try:
        while True:
            wait("barrier")
    except RuntimeError as error:
        text = str(error)
    end()  # the process runs further jobs
    return text


def end_by_fault(ranks: Ranks, draw: random.Random) -> str:
    fault = draw.choice([signal.SIGKILL, signal.SIGSTOP])
    victim = draw.randrange(len(ranks.workers))
    idle = draw.choice([0.0, 2.0, LONG_IDLE])
    # A thread that does not fail is an error of this way; FSDP 2 leaves threads of its own when it fails.
    way = draw.choice([way for way in WAYS if way not in ("joined thread", "FSDP 2")])
    ranks.start(until_failure, way, idle, victim, fault)
    if fault == signal.SIGSTOP:
        outcomes, took = ranks.collect_beside_stopped(victim, LIMIT)
        assert took < GROUP_TIMEOUT + LATENESS, f"{way} after {idle:g} s: {took:.1f} s"
    else:
        outcomes = ranks.collect(LIMIT)
        assert outcomes.pop(victim).died
    for outcome in outcomes:
        assert not outcome.failed, str(outcome)
        text = str(outcome.value)
        assert f"rank {victim}" in text.lower(), f"{way} after {idle:g} s: {text}"
    return f"{signal.Signals(fault).name} after {idle:g} s"


@pytest.mark.timeout(0)  # every part of a job has a limit
def test_random_mismatches(pool: Pool, tmp_path: Path) -> None:
    number = seed()
    until, jobs = time.monotonic() + SECONDS, 0
    done: collections.Counter[str] = collections.Counter()
    while time.monotonic() < until:
        draw = random.Random(number + jobs)
        jobs += 1
        size = draw.randint(2, 5)
        hosts = "".join(draw.choice("ab") for _ in range(size))
        env = {"HOROVOD_DEADLOCK_TIME_SECONDS": str(DEADLOCK_TIME)}
        with pool.ranks(size, init=False, hosts=hosts, env=env) as ranks:
            try:
                ranks.run(begin, new_file(tmp_path), "horoplug", GROUP_TIMEOUT)
                for part in range(draw.randint(1, 4)):
                    pairs = draw.sample(PAIRS, draw.randint(1, 6))
                    results = ranks.run(mismatched, pairs, timeout=LIMIT)
                    for pair, texts in zip(pairs, zip(*results, strict=True), strict=True):
                        for text in texts:
                            assert is_named(text, size), (pair, text)
                        done[pair[0]] += 1
                    idle = draw.choice([0.0, 0.5, 3 * DEADLOCK_TIME])
                    assert all(ranks.run(idle_then, idle, part, timeout=LIMIT))
                    done["late ranks"] += 1
                if draw.random() < 0.5:
                    done[end_by_fault(ranks, draw)] += 1
                else:
                    ranks.run(end)
                    done["without a fault"] += 1
            except BaseException:
                print(f"job {number + jobs - 1}, size {size}, hosts {hosts}")
                raise
    print(f"{jobs} jobs with {len(OTHERS)} kinds of operations: {dict(done)}")
