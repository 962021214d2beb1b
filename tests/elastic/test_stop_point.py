"""The members of an elastic job agree at which of their checks they stop, without a message before an update."""

import random
import threading

import pytest

from horoplug.base.errors import HorovodInternalError
from horoplug.rendezvous.elastic import stop_point
from horoplug.rendezvous.elastic.stop_point import (
    PAUSE_SECONDS,
    VOTE_SECONDS,
    Announce,
    Decide,
    StopPoint,
    StopVote,
)
from tests.harness.support import seed

LIMIT = 30.0  # seconds for waits that end at once


class Job:
    """Members that make checks in threads, each after an operation that waits for all members, and the launcher's vote.
    The test delivers the messages, in any order."""

    def __init__(self, size, checks):
        self.points = [StopPoint() for _ in range(size)]
        self.operation = threading.Barrier(size)
        self.stopped = [None] * size  # the check at which each member has stopped
        self.checks = checks
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(size)]
        for thread in self.threads:
            thread.start()

    def _run(self, member):
        for check in range(1, self.checks + 1):
            self.operation.wait(LIMIT)
            if self.points[member].check():
                self.stopped[member] = check
                return

    def join(self):
        for thread in self.threads:
            thread.join(LIMIT)
            assert not thread.is_alive()


def vote(job, draw, now=0.0):
    """Hold a vote, in which messages of the members arrive in any order. Returns the decision."""
    members = list(range(len(job.points)))
    election = StopVote(tuple(members), now)
    assert list(election.advance(now)) == [Announce(0)]
    draw.shuffle(members)
    for member in members:
        assert list(election.advance(now)) == []
        election.count(member, 0, job.points[member].announce())
    (decision,) = election.advance(now)
    assert election.due is None
    draw.shuffle(members)
    for member in members:
        job.points[member].decide(decision.stop)
    return decision.stop


def test_all_members_stop_at_the_same_check():
    draw = random.Random(seed())
    for _ in range(200):
        job = Job(draw.randint(1, 5), checks=2000)
        for _ in range(draw.randint(0, 50)):
            threading.Event().wait(0)  # let the members run
        stop = vote(job, draw)
        job.join()
        ended = stop > job.checks  # they had made all of their checks already
        assert job.stopped == [None if ended else stop] * len(job.points)


def test_update_before_the_first_check_stops_at_it():
    point = StopPoint()
    assert point.announce() == 0
    point.decide(1)
    assert point.check()
    assert not point.check()


def test_checks_without_an_update_do_not_stop():
    point = StopPoint()
    assert not any(point.check() for _ in range(100))
    assert point.announce() == 100


def test_member_waits_only_in_the_check_after_its_message():
    """Its message promises that it makes no check beyond the next one, which waits until the launcher has decided."""
    point = StopPoint()
    point.announce()
    results = []
    thread = threading.Thread(target=lambda: results.extend([point.check(), point.check()]))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    point.decide(2)
    thread.join(LIMIT)
    assert results == [False, True]


def test_check_fails_if_the_launcher_does_not_decide(monkeypatch):
    """The time before the check does not count."""
    monkeypatch.setattr(stop_point, "DECISION_SECONDS", 1)
    point = StopPoint()
    point.announce()
    with pytest.raises(HorovodInternalError, match="has not said for 1 s whether the processes"):
        point.check()
    point.decide(None)
    assert not point.check()


def test_round_that_was_called_off_stops_nobody():
    job = Job(3, checks=100)
    counts = [point.announce() for point in job.points]
    assert max(counts) - min(counts) <= 1
    for point in job.points:
        point.decide(None)
    job.join()
    assert job.stopped == [None] * 3


class TestVote:
    def test_waits_for_all_members(self):
        election = StopVote((3, 5), 100.0)
        assert election.due == 100.0
        assert list(election.advance(100.0)) == [Announce(0)]
        assert election.due == 100.0 + VOTE_SECONDS
        election.count(3, 0, 7)
        election.count(4, 0, 90)  # not a member
        election.count(5, 1, 90)  # of another round
        assert list(election.advance(101.0)) == []
        election.count(5, 0, 8)
        assert list(election.advance(101.0)) == [Decide(0, 9)]
        assert list(election.advance(1000.0)) == []
        assert election.unused_round == 1

    def test_is_called_off_if_a_member_does_not_answer_and_held_again_later(self):
        election = StopVote((0, 1), 0.0)
        assert list(election.advance(0.0)) == [Announce(0)]
        election.count(0, 0, 4)
        assert list(election.advance(VOTE_SECONDS)) == [Decide(0, None)]
        assert election.unused_round == 1
        election.count(1, 0, 4)  # too late
        again = VOTE_SECONDS + PAUSE_SECONDS
        assert election.due == again
        assert list(election.advance(again - 0.1)) == []
        assert list(election.advance(again)) == [Announce(1)]
        for member in (0, 1):
            election.count(member, 1, 20)
        assert list(election.advance(again)) == [Decide(1, 21)]

    @pytest.mark.parametrize("announced", [False, True])
    def test_is_called_off_when_the_membership_ends(self, announced):
        election = StopVote((0, 1), 0.0)
        if announced:
            list(election.advance(0.0))
            election.count(0, 0, 4)
        assert list(election.end()) == ([Decide(0, None)] if announced else [])
        assert list(election.end()) == list(election.advance(1000.0)) == []
        assert election.unused_round == announced

    def test_that_was_decided_stands_when_the_membership_ends(self):
        election = StopVote((0,), 0.0)
        list(election.advance(0.0))
        election.count(0, 0, 4)
        assert list(election.advance(0.0)) == [Decide(0, 5)]
        assert list(election.end()) == []
