"""Slow processes of an elastic job are found, reported, and replaced if the user wants it."""

import re
import sys

import pytest

from horoplug.runner.elastic.stragglers import LEAST_SHARE, WINDOWS, Stragglers
from tests.harness import program_text
from tests.harness.elastic_launcher import launched, launcher_lines

SECONDS = 10.0


class Job:
    """Processes whose times are given by window: how many seconds of ten they compute."""

    def __init__(self, *computing, factor=2.0):
        self.times = dict.fromkeys(range(len(computing)), (0.0, 0.0))
        self.computing = dict(enumerate(computing))
        self.stragglers = Stragglers(tuple(self.times), factor, SECONDS)

    def window(self, **changed):
        """Let a window pass, in which each process reports twice. Returns the processes that are found to be slow."""
        found = []
        for part in (0.5, 0.5):
            for process, (elapsed, active) in self.times.items():
                computing = changed.get(f"p{process}", self.computing[process])
                elapsed += part * SECONDS
                active += part * (SECONDS - computing)
                self.times[process] = elapsed, active
                found += self.stragglers.report(process, elapsed, active)
        return found


def test_process_that_computes_longer_is_slow_after_two_windows_and_reported_once():
    job = Job(3, 3, 9, 3.5)
    assert WINDOWS == 2
    assert job.window() == []
    (slow,) = job.window()
    assert (slow.process, slow.window) == (2, SECONDS)
    assert slow.factor == pytest.approx(3)
    assert str(slow) == (
        "in the last 10.0 s it computed for 9.0 s, waited for 0.0 s and communicated for 1.0 s; "
        "the others computed for 3.0 s"
    )
    assert job.window() == []
    assert job.window(p2=3) == []
    assert job.window() == []
    assert [slow.process for slow in job.window()] == [2]


def test_times_of_a_process_that_waits_for_a_slower_one():
    job = Job(8, 2.5, 4, factor=1.5)
    job.window()
    (slow,) = job.window()
    assert slow.process == 0
    assert (slow.communicating, slow.waiting) == pytest.approx((2, 0))
    assert slow.others == pytest.approx(3.25)


@pytest.mark.parametrize(
    "computing",
    [
        (5, 5, 5),
        (5, 5, 9),  # less than twice
        (0.1, 0.1, SECONDS * LEAST_SHARE * 0.9),  # all communicate nearly all of the time
        (7,),  # no other one
    ],
)
def test_nobody_is_slow(computing):
    job = Job(*computing)
    assert [job.window() for _ in range(10)] == [[]] * 10


def test_process_that_was_slow_in_one_window_only_is_not():
    job = Job(3, 3, 3)
    assert [job.window(p1=9), job.window(), job.window(p1=9), job.window()] == [[]] * 4


def test_two_processes():
    job = Job(2, 9)
    job.window()
    assert [slow.process for slow in job.window()] == [1]


def test_reports_of_unknown_processes_are_ignored():
    stragglers = Stragglers((3, 4), 2.0, SECONDS)
    assert stragglers.report(5, 100.0, 0.0) == []
    for turn in range(1, 5):
        stragglers.report(3, turn * SECONDS, 0.0)
    assert stragglers.report(4, 5.0, 0.0) == []  # its window has not ended


# Process 1 computes for longer than the others.
TRAIN = program_text("tests/elastic/programs/stragglers.py")
TIMES = (
    r"in the last \d+\.\d s it computed for \d+\.\d s, waited for \d+\.\d s and communicated for "
    r"\d+\.\d s; the others computed for \d+\.\d s"
)


def test_slow_process_of_a_job_is_reported():
    code, out, err = launched(
        *("-np", 3, "--min-np", 2, sys.executable, "-c", TRAIN), HOROPLUG_SLOW_SECONDS="1"
    )
    assert code == 0, err
    assert out.count("done 3 80") == 3
    lines = launcher_lines(err)
    assert len(lines) == 1, lines
    (line,) = lines
    assert re.fullmatch(rf"process 1 \(rank 1\) on localhost is slow: {TIMES}", line)


def test_no_process_is_reported_if_the_user_does_not_want_it():
    code, _, err = launched(
        *("-np", 3, "--min-np", 2, sys.executable, "-c", TRAIN),
        HOROPLUG_SLOW_SECONDS="0.5",
        HOROPLUG_SLOW_FACTOR="0",
    )
    assert code == 0, err
    assert launcher_lines(err) == []
