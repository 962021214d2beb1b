"""The parts of the test harness whose defects other tests would not reveal."""

import os
import signal
import subprocess

import pytest

from tests.harness.support import Pool, has_ended, once_this_thread_waits, until


def stand_still(mark):
    mark.touch()
    signal.pause()


def test_stacks_of_a_hanging_rank_are_printed(tmp_path, capfd):
    pool = Pool()
    try:
        with pool.ranks(1) as ranks:
            ranks.start(stand_still, tmp_path / "here")
            until((tmp_path / "here").exists)
            with pytest.raises(pytest.fail.Exception, match=r"\[0\] were not done after 0\.\d+ s"):
                ranks.collect(timeout=0.1)
            assert ranks.workers[0].process.poll() is not None
    finally:
        pool.close()
    assert "stand_still" in capfd.readouterr().err


def fail_on_rank_1():
    import horoplug as hvd

    assert hvd.rank() == 0, "too early"
    signal.pause()


def test_waiting_for_a_job_ends_with_the_error_of_a_rank(tmp_path):
    """Ranks that answer before the test has asked would otherwise answer the next question with it."""
    pool = Pool()
    try:
        with pool.ranks(2) as ranks:
            ranks.start(fail_on_rank_1)
            with pytest.raises(pytest.fail.Exception, match=r"(?s)--- rank 1: .*too early"):
                ranks.until((tmp_path / "never").exists)
            assert all(worker.process.poll() is not None for worker in ranks.workers)
    finally:
        pool.close()


def test_action_happens_once_a_thread_waits():
    """The action does not happen while the thread computes, and it ends the wait."""
    happened = []
    with once_this_thread_waits(lambda: happened.append(1)):
        assert not any(happened for _ in range(1_000_000))
        until(lambda: happened)


def test_a_process_that_its_parent_has_not_waited_for_has_ended():
    assert not has_ended(os.getpid())
    child = subprocess.Popen(["true"])
    until(lambda: has_ended(child.pid))
    assert child.wait() == 0
    assert has_ended(child.pid)
