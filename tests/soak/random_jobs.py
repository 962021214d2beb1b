"""Random jobs with random faults for HOROPLUG_SOAK_SECONDS seconds: `make soak`; not a part of `make test`.

There must be no wrong result, hang, leak or false alarm. After a fault all other ranks get an error that names the
victim, also if they have been idle before it. Processes run many jobs; they end each with the descriptors and threads
that they had after their first. Some jobs use PyTorch, TensorFlow and JAX, in other processes than those with NumPy
only. Some run under mpirun."""

import collections
import contextlib
import importlib.util
import os
import random
import time
from collections.abc import Iterator

import pytest

import horoplug as hvd
from tests.harness.mpi_jobs import find, no_files_of_mpi
from tests.harness.support import Pool, Ranks, process_memory, seed
from tests.soak import mpi
from tests.soak.frameworks import JOBS, prepare
from tests.soak.leaks import excess
from tests.soak.program import FATAL, FAULTS, Episode, draw_episode, run_episode

__all__ = ["no_files_of_mpi"]  # a fixture

SECONDS = float(os.environ.pop("HOROPLUG_SOAK_SECONDS", "60"))
LIMIT = 300.0  # seconds for an episode
LATENESS = 25.0  # seconds after its limit by which a stopped rank is named on a busy machine; less than LONG_IDLE
SETTINGS: list[dict[str, str]] = [
    {},
    {},
    {"HOROVOD_FUSION_THRESHOLD": "0"},
    {"HOROVOD_FUSION_THRESHOLD": "4096"},
    {"HOROVOD_CACHE_CAPACITY": "0"},
    {"HOROPLUG_NUM_STREAMS": "3"},
    {"HOROPLUG_CONNECT_ALL": "0"},
    {"HOROPLUG_ENCRYPT": "1"},
    {"HOROPLUG_ALGORITHM": "ring"},
    {"HOROVOD_AUTOTUNE": "1"},
]
# The sets of frameworks of jobs, some more often than others. Processes import TensorFlow in three seconds.
FRAMEWORKS = ("numpy",) * 6 + ("torch",) * 2 + ("tensorflow", "jax", "all")
COMPILERS = ("tensorflow", "jax", "all")  # those whose programs take time to compile
# How jobs end, some more often than others: a stopped rank is noticed only after a limit.
ENDS = (None, None, "kill", "kill", "exit", "exit", "leave", "leave", "stop")
NOT_FATAL = [fault for fault in FAULTS if fault not in FATAL]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}


def limits(fatal: str | None, compiles: bool) -> dict[str, str]:
    """Limits that a busy machine does not reach, also not while a rank compiles and others wait for it.

    A stopped rank is reported after a limit without progress."""
    # An error within LIMIT is thus due to the detection of a failure, and not to a time limit.
    found = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "600"}
    if compiles:
        found["HOROVOD_DEADLOCK_TIME_SECONDS"] = "15"
    if fatal == "stop":
        limit = "40" if compiles else "10"
        found |= {
            "HOROVOD_GLOO_TIMEOUT_SECONDS": limit,
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": limit,
        }
    return found


@pytest.fixture
def pools() -> Iterator[dict[bool, Pool]]:
    """By whether the processes may import other frameworks than NumPy, which makes them large."""
    pools = {False: Pool(), True: Pool(variables=QUIET)}
    yield pools
    for pool in pools.values():
        pool.close()


def again() -> None:
    hvd.shutdown()
    hvd.init()


class Soak:
    def __init__(self, pools: dict[bool, Pool], key: int) -> None:
        self.pools = pools
        self.draw = random.Random(key)
        self.done: collections.Counter[str] = collections.Counter()
        # By process: the ways in which it has run operations, and its descriptors, threads and segments after the first
        # job with these ways.
        self.used: dict[int, frozenset[str]] = {}
        self.usage: dict[tuple[int, frozenset[str]], tuple[int, ...]] = {}
        self.memory: dict[int, list[int]] = collections.defaultdict(list)

    def job(self) -> None:
        """One job of random size: some episodes, of which the last may have a fatal fault."""
        draw = self.draw
        frameworks = draw.choice(FRAMEWORKS)
        if draw.random() < 0.15:
            frameworks = draw.choice(["numpy", "numpy", frameworks])
            env = limits(None, frameworks in COMPILERS) | QUIET
            self.done += mpi.run_job(draw, frameworks, LIMIT, env)
            self.done[f"jobs with {frameworks} under mpirun"] += 1
            return
        compiles = frameworks in COMPILERS
        size = draw.randint(2, 8 if not compiles or draw.random() < 0.1 else 4)
        hosts = "".join(draw.choice("abc"[: draw.randint(1, 3)]) for _ in range(size))
        fatal = draw.choice(ENDS if not compiles else [*ENDS, *[None] * len(ENDS)])
        env = draw.choice(SETTINGS) | limits(fatal, compiles)
        self.description = f"{frameworks}, size {size}, hosts {hosts}, {env}, ends with {fatal}"
        pool = self.pools[frameworks != "numpy"]
        with pool.ranks(size, hosts=hosts, env=env) as ranks:
            ranks.run(prepare, JOBS[frameworks], timeout=LIMIT)
            for _ in range(draw.randint(0 if fatal else 1, 3)):
                kind = draw.choice([*[None] * (6 if compiles else 3), *NOT_FATAL])
                self.episode(ranks, draw_episode(draw, size, kind, frameworks))
                if draw.random() < 0.2:
                    ranks.run(again)
                    self.done["re-inits"] += 1
            if fatal:
                limit = float(env["HOROVOD_GLOO_TIMEOUT_SECONDS"])
                self.fatal(ranks, draw_episode(draw, size, fatal, frameworks), limit)
        self.done[f"jobs with {frameworks}"] += 1
        for worker in ranks.workers:
            used = self.used.get(worker.process.pid, frozenset())
            self.used[worker.process.pid] = used | {*JOBS[frameworks]}
        self.measure(pool)

    def episode(self, ranks: Ranks, episode: Episode) -> None:
        with self.described(episode):
            self.done["operations"] += sum(ranks.run(run_episode, episode, timeout=LIMIT))
            self.done[episode.fault.kind if episode.fault else "without a fault"] += 1

    def fatal(self, ranks: Ranks, episode: Episode, limit: float) -> None:
        fault = episode.fault
        assert fault
        with self.described(episode):
            ranks.start(run_episode, episode)
            if fault.kind == "stop":
                outcomes, took = ranks.collect_beside_stopped(fault.victim, LIMIT)
                # Idle time before must not count.
                text = f"named after {took:.1f} s, with a limit of {limit:g} s"
                assert took < limit + LATENESS, text
            else:
                outcomes = ranks.collect(LIMIT)
                outcome = outcomes.pop(fault.victim)
                assert outcome.died if fault.kind != "leave" else outcome.kind == "Left", str(
                    outcome
                )
            for outcome in outcomes:
                assert outcome.kind == "HorovodInternalError", str(outcome)
                assert f"rank {fault.victim}" in outcome.message, outcome.message
            self.done[fault.kind] += 1

    @contextlib.contextmanager
    def described(self, episode: Episode) -> Iterator[None]:
        try:
            yield
        except BaseException:
            print(self.description, episode, dict(self.done), sep="\n")
            raise

    def measure(self, pool: Pool) -> None:
        """The job has ended; look at what its processes still have."""
        for worker in pool.workers:
            if worker.process.poll() is not None or worker.connection.closed:
                continue
            pid = worker.process.pid
            key = pid, self.used[pid]
            ((usage, more),) = Ranks([worker]).run(excess, self.usage.get(key))
            first = self.usage.setdefault(key, usage)
            self.memory[pid].append(process_memory(pid))
            assert not more, (
                f"{self.description}: descriptors, threads, segments: {first} -> {usage}"
            )


@pytest.mark.timeout(SECONDS + 4 * LIMIT)
def test_random_jobs_with_random_faults(pools: dict[bool, Pool]) -> None:
    for name in mpi.NAMES:
        find(name)
    for name in ("torch", "tensorflow", "jax", "mpi4py"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: make soak")
    key = seed()
    soak = Soak(pools, key)
    end = time.monotonic() + SECONDS
    reported = time.monotonic()
    while time.monotonic() < end:
        soak.job()
        if time.monotonic() > reported + 60:
            reported = time.monotonic()
            print(f"{end - reported:.0f} s remain: {dict(soak.done)}", flush=True)
    print(dict(soak.done))
    for memory in soak.memory.values():
        if len(memory) >= 60:
            third = len(memory) // 3
            before, after = max(memory[third : 2 * third]), max(memory[2 * third :])
            print(f"memory of a process in {len(memory)} jobs: {before >> 20} to {after >> 20} MiB")
            assert after < 1.1 * before + (8 << 20), memory
