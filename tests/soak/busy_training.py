"""Training beside evaluation threads, data-loader threads and long checkpoints for a minute: `make soak`.

Rank 0 is away for longer than DEADLOCK_TIME_SECONDS again and again. That is no deadlock, since it may continue."""

import pytest

from tests.harness.busy_training import Load, run
from tests.harness.support import Pool, seed

LIMITS = {
    "HOROVOD_DEADLOCK_TIME_SECONDS": "2",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "3",
}
LOAD = Load(seconds=60, checkpoint=5, evaluation=1)


@pytest.fixture
def pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hosts", ["aa", "aab", "abab"])
def test_busy_ranks_are_no_failure(pool, hosts):
    key = seed()
    with pool.ranks(len(hosts), hosts=hosts, env=LIMITS) as job:
        results = job.run(run, LOAD, key, timeout=400)
    for rank, result in enumerate(results):
        print(f"rank {rank}: {result}")
