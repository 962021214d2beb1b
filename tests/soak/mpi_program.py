"""What a rank of a soak test does under mpirun: random episodes, with re-initialisations between them.

    python -c 'from tests.soak.mpi_program import main; main()' JOB

JOB is the representation of a Job."""

import ast
import collections
import dataclasses
import faulthandler
import os
import random
import sys


@dataclasses.dataclass(frozen=True)
class Job:
    """``start``: who initialises MPI, and with which thread level, a key of STARTS. ``limit``: seconds for an
    episode."""

    seed: int
    hosts: str  # one letter for each rank
    frameworks: str
    start: str
    episodes: int
    leaves: bool  # in the last episode a rank shuts down
    limit: float

    @property
    def text(self) -> str:
        return repr(dataclasses.asdict(self))


# The thread level with which horoplug initialises MPI; None: the program does, or nobody says anything.
STARTS = {
    "program": None,
    "horoplug": None,
    "horoplug, multiple": "multiple",
    "horoplug, funneled": "funneled",
}


def main() -> None:
    job = Job(**ast.literal_eval(sys.argv[1]))
    number = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["HOROVOD_HOSTNAME"] = job.hosts[number]
    if level := STARTS[job.start]:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.thread_level = level
    elif job.start == "program":
        from mpi4py import MPI  # noqa: F401
    done = _run(job)
    # With one write: all processes share this output.
    sys.stdout.write(f"rank {number} of {len(job.hosts)} is done: {dict(done)}\n")


def _run(job: Job) -> collections.Counter[str]:
    import horoplug as hvd
    from tests.soak.frameworks import JOBS, prepare
    from tests.soak.leaks import excess
    from tests.soak.program import draw_episode, run_episode
    from tests.soak.streams import Left

    done: collections.Counter[str] = collections.Counter()
    draw = random.Random(job.seed)
    before: tuple[int, ...] | None = None
    prepare(JOBS[job.frameworks])
    hvd.init()
    size = hvd.size()
    assert size == len(job.hosts)
    for number in range(job.episodes):
        is_last = number == job.episodes - 1
        kind = (
            "leave"
            if is_last and job.leaves
            else draw.choice([None, None, None, "mismatch", "deadlock"])
        )
        episode = draw_episode(draw, size, kind, job.frameworks)
        # If the episode takes too long, the process prints its stacks and exits.
        faulthandler.dump_traceback_later(job.limit, exit=True)
        try:
            done["operations"] += run_episode(episode)
            assert kind != "leave", "no failure after a rank has left"
        except Left:
            pass
        except hvd.HorovodInternalError as error:
            fault = episode.fault
            if kind != "leave" or fault is None:
                raise RuntimeError(f"failure in {episode}") from error
            if f"rank {fault.victim}" not in str(error):
                raise RuntimeError(f"the error does not name the victim of {fault}") from error
        except BaseException:
            sys.stderr.write(f"in {episode}\n")
            raise
        done[kind or "without a fault"] += 1
        hvd.shutdown()
        # MPI opens connections when ranks first use them, so that the first jobs may add descriptors.
        if number > 0 and not (is_last and job.leaves):
            usage, more = excess(before)
            assert not more, f"descriptors, threads, segments: {before} -> {usage} in job {number}"
            before = before or usage
        hvd.init()
        done["re-inits"] += 1
    hvd.barrier()
    hvd.shutdown()
    faulthandler.cancel_dump_traceback_later()
    return done
