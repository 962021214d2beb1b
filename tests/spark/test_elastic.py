"""Executors of a local cluster are killed while ranks of horoplug.spark train on them."""

import io
import os
import signal
import time
from pathlib import Path

import pytest

import horoplug.spark
from horoplug.spark import session
from tests.harness.limits import scaled
from tests.harness.spark_cluster import executor
from tests.harness.support import until

pytest_plugins = ["tests.harness.spark_cluster"]


@pytest.fixture(scope="module", autouse=True)
def spark(spark_cluster):
    return spark_cluster


def run(function, *args, **options):
    """The results, and the lines of the job and its ranks."""
    lines = io.StringIO()
    found = function(*args, stdout=lines, stderr=lines, verbose=2, **options)
    return found, lines.getvalue()


def train(folder):
    """Make 20 steps with two ranks, of which one then kills its executor, and 10 steps with its replacement."""
    import numpy as np

    import horoplug as hvd
    from horoplug.common.elastic import ObjectState, initialize_again, run_fn

    hvd.init()
    state = ObjectState(hvd.broadcast_object, hvd.rank, before=0, after=0)

    def loop(state):
        while state.after < 10:
            is_killed = np.array([(folder / "killed").exists()], dtype=np.uint8)
            is_killed = hvd.allreduce(is_killed, op=hvd.Min, name="killed")[0]
            if hvd.size() == 2 and is_killed:
                state.after += 1
            elif hvd.size() == 2:
                state.before += 1
            if state.before == 20 and state.after == 0 and hvd.rank() == 1:
                (folder / "killed").write_text(str(os.getpid()))
                os.kill(executor(), signal.SIGKILL)
                signal.pause()
            state.commit()
        return hvd.rank(), hvd.size(), state.before, state.after

    found = run_fn(loop, initialize_again)(state)
    with open(folder / "ends", "a") as file:
        print(os.getpid(), file=file)
    return found


def test_a_killed_executor_ends_a_job_of_fixed_size_with_the_rank(spark, tmp_path):
    def train():
        import numpy as np

        import horoplug as hvd

        hvd.init()
        with open(tmp_path / "ran", "a") as file:
            print(hvd.rank(), os.getpid(), time.time(), file=file)
        for step in range(10**6):
            if step == 20 and hvd.rank() == 1:
                os.kill(executor(), signal.SIGKILL)
            hvd.allreduce(np.ones(1), name="ones")

    with pytest.raises(horoplug.spark.RankError) as caught:
        run(horoplug.spark.run, train)
    seen = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert time.time() - float(seen[-1][2]) < scaled(20)
    assert str(caught.value).startswith("rank 1 was lost: the Spark task or its executor on ")
    assert caught.value.rank == 1
    assert sorted(rank for rank, _, _ in seen) == ["0", "1"]
    until(lambda: not any(Path("/proc", pid).exists() for _, pid, _ in seen))
    until(lambda: not list(spark.sparkContext.statusTracker().getActiveJobsIds()))


@pytest.mark.short(failure=True)
def test_an_elastic_job_goes_on_without_a_killed_executor_and_takes_its_replacement(tmp_path):
    found, lines = run(horoplug.spark.run_elastic, train, (tmp_path,), num_proc=2, min_num_proc=1)
    assert found == [(0, 2, 20, 10), (1, 2, 20, 10)]
    assert "process 1 (rank 1) on " in lines
    assert "was lost: its Spark task or executor has ended" in lines
    assert "the job goes on with 1 process on 1 host" in lines
    assert "the job goes on with 2 processes on 1 host" in lines
    killed = (tmp_path / "killed").read_text()
    ends = (tmp_path / "ends").read_text().split()
    assert len(set(ends)) == 2
    assert killed not in ends


def test_a_process_that_raises_is_replaced_until_the_limit():
    def fail():
        import horoplug as hvd

        hvd.init()
        raise ValueError("always")

    with pytest.raises(horoplug.spark.RankError, match="ValueError: always") as caught:
        run(horoplug.spark.run_elastic, fail, num_proc=1, reset_limit=1)
    assert 'raise ValueError("always")' in caught.value.traceback


def test_an_elastic_job_may_end_without_init(tmp_path):
    assert run(horoplug.spark.run_elastic, lambda: 5, num_proc=1)[0] == [5]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_num_proc": 9}, "min_num_proc=9, but Spark runs only 2 tasks at once"),
        ({"min_num_proc": 3, "max_num_proc": 2}, "^min_num_proc 3 is more than max_num_proc 2$"),
    ],
)
def test_wrong_numbers_have_one_line(options, text, monkeypatch):
    monkeypatch.setattr(session, "_EXECUTORS_SECONDS", 0.0)
    monkeypatch.setattr(session, "_REPLACEMENT_SECONDS", 0.0)
    with pytest.raises(ValueError, match=text) as caught:
        horoplug.spark.run_elastic(print, **options)
    assert "\n" not in str(caught.value)
