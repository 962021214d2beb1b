"""Random jobs of a soak test under mpirun: MPI is the bootstrap, and carries data between hosts in some."""

import ast
import collections
import random
import re

from tests.harness.mpi_jobs import find, finish, mpirun
from tests.soak.mpi_program import STARTS, Job

NAMES = ("openmpi", "mpich")
# Variables of the job: what carries data between hosts, and with which algorithms.
SETTINGS: list[dict[str, str]] = [
    {},
    {"HOROVOD_CPU_OPERATIONS": "gloo"},
    {"HOROVOD_CPU_OPERATIONS": "mpi"},
    {"HOROVOD_CPU_OPERATIONS": "mpi", "HOROPLUG_ALGORITHM": "mpi"},
    {"HOROVOD_CPU_OPERATIONS": "mpi", "HOROPLUG_ALGORITHM": "ring"},
    {"HOROVOD_CPU_OPERATIONS": "mpi", "HOROVOD_FUSION_THRESHOLD": "4096"},
    {"HOROVOD_CPU_OPERATIONS": "mpi", "HOROVOD_CACHE_CAPACITY": "0"},
]
SCRIPT = "from tests.soak.mpi_program import main; main()"


def run_job(
    draw: random.Random, frameworks: str, limit: float, variables: dict[str, str]
) -> collections.Counter[str]:
    """One job with a random MPI. ``limit``: seconds for an episode. Returns what its rank 0 has done. Fails the test
    with the job's output."""
    name = draw.choice(NAMES)
    place = find(name)
    size = draw.randint(2, 5)
    hosts = "".join(draw.choice("abc"[: draw.randint(1, 3)]) for _ in range(size))
    env = variables | draw.choice(SETTINGS)
    episodes = draw.randint(1, 5)
    job = Job(
        seed=draw.randrange(2**31),
        hosts=hosts,
        frameworks=frameworks,
        start=draw.choice(list(STARTS)),
        episodes=episodes,
        leaves=draw.random() < 0.3,
        limit=limit,
    )
    status, output = finish(
        mpirun(place, SCRIPT, job.text, np=size, **env), timeout=limit * (episodes + 1)
    )
    found = re.findall(r"rank \d of \d is done: (.*)", output)
    assert (status, len(found)) == (0, size), f"{name}, {env}, {job}: status {status}\n{output}"
    return collections.Counter(ast.literal_eval(found[0]))
