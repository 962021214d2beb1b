"""A short form of tests/soak: random episodes with each set of frameworks, without faults."""

import importlib.util
import random

import pytest

from tests.harness.support import seed
from tests.soak.frameworks import JOBS, prepare
from tests.soak.program import draw_episode, run_episode

pytest_plugins = ["tests.harness.jobs"]


@pytest.mark.parametrize("frameworks", JOBS)
def test_random_episodes(pool, frameworks):
    needed = ("tensorflow", "jax") if frameworks == "all" else (frameworks,)
    for name in needed:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    draw = random.Random(seed())
    with pool.ranks(3, hosts="aab") as job:
        job.run(prepare, JOBS[frameworks])
        for _ in range(2):
            assert sum(job.run(run_episode, draw_episode(draw, 3, None, frameworks)))
