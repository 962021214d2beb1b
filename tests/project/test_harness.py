"""The parts of the test harness whose defects other tests would not reveal."""

import signal

import pytest

from tests.harness.support import Pool, once_this_thread_waits, until


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


def test_action_happens_once_a_thread_waits():
    """The action does not happen while the thread computes, and it ends the wait."""
    happened = []
    with once_this_thread_waits(lambda: happened.append(1)):
        assert not any(happened for _ in range(1_000_000))
        until(lambda: happened)
