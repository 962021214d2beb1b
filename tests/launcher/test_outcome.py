"""How a job ends: exit code, last line and time limit, decided from recorded events without a process."""

import signal

import pytest

from horoplug.runner.agent.agent import KILL, TERMINATE
from horoplug.runner.ending.blame import CAUSE_SECONDS, LAST_WORDS_SECONDS
from horoplug.runner.ending.outcome import Outcome

GRACE = 5.0


@pytest.fixture
def outcome():
    """The outcome of a job of three ranks, which can run."""
    made = Outcome(3, GRACE)
    made.ranks_can_run()
    return made


def rank_ended(outcome, rank, code, now=0.0, departures=(), present=0):
    outcome.rank_ended(rank, code, now, departures=departures, present=present)


@pytest.mark.short
def test_successful_ranks_do_not_end_the_job(outcome):
    for rank in range(3):
        rank_ended(outcome, rank, 0)
    assert (outcome.is_ending, outcome.due, outcome.deadline) == (False, None, None)
    assert (outcome.code, outcome.verdict) == (0, "")
    assert outcome.ended == {0, 1, 2}


@pytest.mark.parametrize(
    ("code", "text", "exit_code"),
    [
        (7, "rank 1 exited with code 7", 7),
        (-signal.SIGKILL, "rank 1 was killed by signal 9 (SIGKILL)", 137),
    ],
)
@pytest.mark.short
def test_first_failed_rank_sets_code_and_line(outcome, code, text, exit_code):
    rank_ended(outcome, 1, code, now=10.0)
    assert (outcome.is_ending, outcome.due) == (False, 10.0)
    outcome.fail_first_rank(10.0)
    assert outcome.is_ending
    assert (outcome.code, outcome.verdict) == (exit_code, f"{text}; the other ranks were ended")


@pytest.mark.short
def test_last_failed_rank_has_no_other_ranks_to_end(outcome):
    rank_ended(outcome, 0, 0)
    rank_ended(outcome, 2, 0)
    rank_ended(outcome, 1, 3)
    outcome.fail_first_rank(0.0)
    assert (outcome.code, outcome.verdict) == (3, "rank 1 exited with code 3")


@pytest.mark.short
def test_decision_waits_for_errors_of_connected_ranks(outcome):
    rank_ended(outcome, 1, -signal.SIGKILL, now=10.0, departures=[1], present=2)
    assert outcome.due == 10.0 + LAST_WORDS_SECONDS


@pytest.mark.short
def test_lost_ranks_are_not_waited_for(outcome):
    rank_ended(outcome, 2, 1, now=10.0, departures=[0, 2])  # rank 0 left first, but still runs
    assert outcome.due == 10.0 + CAUSE_SECONDS
    outcome.ranks_lost([0])
    rank_ended(outcome, 1, 0, now=10.5)
    assert outcome.due == 10.5


@pytest.mark.short
def test_first_failure_is_kept(outcome):
    outcome.fail("host b: no sign of life", 10.0, all_ranks=True)
    outcome.fail("host c: no sign of life", 11.0, 126)
    rank_ended(outcome, 1, 7, now=11.0)
    assert outcome.interrupt(signal.SIGTERM, 12.0) == TERMINATE
    assert (outcome.code, outcome.verdict) == (1, "host b: no sign of life; all ranks were ended")
    assert outcome.due is None  # the ranks end because they were told to


@pytest.mark.short
def test_failure_before_ranks_can_run_mentions_no_ranks():
    outcome = Outcome(3, GRACE)
    outcome.fail("no answer from b", 10.0)
    assert (outcome.code, outcome.verdict) == (1, "no answer from b")


@pytest.mark.short
def test_limit_for_agents_covers_the_grace_period_once_ranks_can_run(outcome):
    outcome.fail("host b is lost", 10.0)
    assert outcome.deadline > 10.0 + GRACE
    early = Outcome(3, GRACE)
    early.fail("no answer from b", 10.0)
    assert 10.0 < early.deadline < 10.0 + GRACE


@pytest.mark.short
def test_later_events_do_not_extend_the_limit(outcome):
    outcome.interrupt(signal.SIGINT, 10.0)
    deadline = outcome.deadline
    outcome.interrupt(signal.SIGINT, 20.0)
    outcome.fail("host b is lost", 30.0)
    assert outcome.deadline == deadline


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "terminated"),
        (signal.SIGHUP, "ended by SIGHUP"),
    ],
)
@pytest.mark.short
def test_signal_ends_all_ranks(outcome, number, word):
    assert outcome.interrupt(number, 10.0) == TERMINATE
    assert (outcome.code, outcome.verdict) == (128 + number, f"{word}; all ranks were ended")


@pytest.mark.short
def test_second_signal_kills_the_ranks(outcome):
    outcome.interrupt(signal.SIGINT, 10.0)
    assert outcome.interrupt(signal.SIGTERM, 10.0) == KILL
    assert (outcome.code, outcome.signals) == (130, 2)


@pytest.mark.short
def test_closed_output_ends_the_job_without_a_line(outcome):
    outcome.fail("host b is lost", 10.0)
    outcome.output_closed()
    assert (outcome.code, outcome.verdict) == (128 + signal.SIGPIPE, "")
