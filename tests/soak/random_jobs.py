"""Random jobs with random faults for HOROPLUG_SOAK_SECONDS seconds: `make soak`; not a part of `make test`.

There must be no wrong result, hang, leak or false alarm. After a fault all other ranks get an error that names the
victim. Processes run many jobs; they end each with the descriptors and threads that they had after their first."""

import collections
import contextlib
import gc
import os
import random
import time

import pytest

import horoplug as hvd
from tests.harness.support import Pool, Ranks, process_memory, resources, seed, wait_until_stopped
from tests.soak.program import FATAL, FAULTS, Episode, draw_episode, run_episode

SECONDS = float(os.environ.pop("HOROPLUG_SOAK_SECONDS", "60"))
LIMIT = 180.0  # seconds for an episode
SETTINGS: list[dict[str, str]] = [
    {},
    {},
    {"HOROVOD_FUSION_THRESHOLD": "0"},
    {"HOROVOD_FUSION_THRESHOLD": "4096"},
    {"HOROVOD_CACHE_CAPACITY": "0"},
    {"HOROPLUG_NUM_STREAMS": "3"},
    {"HOROPLUG_ENCRYPT": "1"},
    {"HOROPLUG_ALGORITHM": "ring"},
    {"HOROVOD_AUTOTUNE": "1"},
]
# A stopped rank is reported after this many seconds without progress, which a busy machine does not reach.
STOPPED = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "10",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10",
}


@pytest.fixture
def pool():
    pool = Pool()
    yield pool
    pool.close()


def excess(before):
    """This rank's descriptors, threads and segments without a job, and whether there are more than before.

    What has just ended may be counted for a moment."""
    deadline = time.monotonic() + 10
    gc.collect()
    while True:
        found = resources()[:3]
        more = any(a > b for a, b in zip(found, before or found, strict=True))
        if not more or time.monotonic() > deadline:
            return found, more
        time.sleep(0.01)


def again():
    hvd.shutdown()
    hvd.init()


class Soak:
    def __init__(self, pool: Pool, key: int) -> None:
        self.pool = pool
        self.draw = random.Random(key)
        self.done: collections.Counter[str] = collections.Counter()
        self.usage: dict[
            int, tuple[int, ...]
        ] = {}  # by process: descriptors, threads, segments after its first job
        self.memory: dict[int, list[int]] = collections.defaultdict(list)

    def job(self) -> None:
        """One job of random size: some episodes, of which the last may have a fatal fault."""
        draw = self.draw
        size = draw.randint(2, 8)
        hosts = "".join(draw.choice("abc"[: draw.randint(1, 3)]) for _ in range(size))
        fatal = draw.choice([None, *FATAL])
        env = draw.choice(SETTINGS) | (STOPPED if fatal == "stop" else {})
        self.description = f"size {size}, hosts {hosts}, {env}, ends with {fatal}"
        with self.pool.ranks(size, hosts=hosts, env=env) as ranks:
            for _ in range(draw.randint(0 if fatal else 1, 3)):
                kind = draw.choice([None, None, None, *(f for f in FAULTS if f not in FATAL)])
                self.episode(ranks, draw_episode(draw, size, kind))
                if draw.random() < 0.2:
                    ranks.run(again)
                    self.done["re-inits"] += 1
            if fatal:
                self.fatal(ranks, draw_episode(draw, size, fatal))
        self.done["jobs"] += 1
        self.measure()

    def episode(self, ranks: Ranks, episode: Episode) -> None:
        with self.described(episode):
            self.done["operations"] += sum(ranks.run(run_episode, episode, timeout=LIMIT))
            self.done[episode.fault.kind if episode.fault else "without a fault"] += 1

    def fatal(self, ranks: Ranks, episode: Episode) -> None:
        fault = episode.fault
        assert fault
        with self.described(episode):
            ranks.start(run_episode, episode)
            victim = ranks.workers[fault.victim]
            others = Ranks([worker for worker in ranks.workers if worker is not victim])
            try:
                if fault.kind == "stop":
                    wait_until_stopped(victim.process.pid)
                outcomes = others.collect(LIMIT)
            finally:
                if fault.kind == "stop":
                    victim.kill()
            if fault.kind == "leave":
                assert victim.receive().kind == "Left"
            for outcome in outcomes:
                assert outcome.kind == "HorovodInternalError", str(outcome)
                assert f"rank {fault.victim}" in outcome.message, outcome.message
            self.done[fault.kind] += 1

    @contextlib.contextmanager
    def described(self, episode: Episode):
        try:
            yield
        except BaseException:
            print(self.description, episode, dict(self.done), sep="\n")
            raise

    def measure(self) -> None:
        """The job has ended; look at what its processes still have."""
        for worker in self.pool.workers:
            if worker.process.poll() is not None or worker.connection.closed:
                continue
            pid = worker.process.pid
            ((usage, more),) = Ranks([worker]).run(excess, self.usage.get(pid))
            first = self.usage.setdefault(pid, usage)
            self.memory[pid].append(process_memory(pid))
            assert not more, (
                f"{self.description}: descriptors, threads, segments: {first} -> {usage}"
            )


@pytest.mark.timeout(SECONDS + 2 * LIMIT)
def test_random_jobs_with_random_faults(pool):
    key = seed()
    soak = Soak(pool, key)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        soak.job()
    print(dict(soak.done))
    for memory in soak.memory.values():
        if len(memory) >= 60:
            third = len(memory) // 3
            before, after = max(memory[third : 2 * third]), max(memory[2 * third :])
            print(f"memory of a process in {len(memory)} jobs: {before >> 20} to {after >> 20} MiB")
            assert after < 1.1 * before + (8 << 20), memory
