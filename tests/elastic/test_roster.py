"""Which processes form an elastic job: the decisions, in simulated jobs without processes and clocks."""

import heapq
import itertools
import random

import pytest

from horoplug.base.host_updates import HostUpdateResult
from horoplug.rendezvous.elastic.messages import Membership, Ready
from horoplug.runner.elastic.discovery import FixedHosts, HostManager
from horoplug.runner.elastic.roster import (
    ENDED_ON_NOTICE,
    FAILURES_WITHOUT_PROGRESS,
    LOSSES_WITHOUT_PROGRESS,
    PROGRESS_SECONDS,
    STARTS_PER_HOST,
    Dismiss,
    Form,
    Kill,
    Limits,
    Notify,
    Roster,
    Say,
    Start,
)
from horoplug.runner.ending.finish import Finish, Why
from horoplug.runner.terms import COMMAND_LINE, Terms
from tests.harness.support import seed

VERSION = "1.0"


class Job:
    """A roster, with a clock that the test sets, and what the roster has asked for."""

    def __init__(self, hosts, *, cooldown=None, **limits):
        self.now = 0.0
        self.discovery = FixedHosts(hosts)
        self.hosts = HostManager(self.discovery, cooldown, clock=lambda: self.now, draw=lambda: 0.0)
        self.hosts.update_available_hosts()
        limits = {"minimum": 1, "maximum": 3, "gather": 5.0, "start": 10.0, "wait": 60.0} | limits
        self.limits = Limits(**limits)
        self.roster = Roster(self.hosts, self.limits, VERSION)
        self.live = {}  # number: Start
        self.attempts = {}
        self.members = ()
        self.generation = 0
        self.must_sync = None  # the members of the membership
        self.finish = None
        self.said = []
        self.advance()

    def advance(self, seconds=0.0):
        """Let time pass, and carry out what the roster asks for. Returns that."""
        self.now += seconds
        found = []
        while actions := self.roster.advance(self.now):
            found += actions
            for action in actions:
                match action:
                    case Start():
                        assert action.process not in self.live
                        self.live[action.process] = action
                    case Form(membership, attempts):
                        assert attempts == tuple(self.attempts[n] for n in membership.processes)
                        self.generation, self.members, self.must_sync = membership
                    case Say(text):
                        assert "\n" not in text
                        self.said.append(text)
                    case Finish():
                        assert self.finish is None
                        self.finish = action
        return found

    def ready(self, *numbers, commits=0, version=VERSION, kept=False, has_state=None):
        """These processes are ready for the next membership. Members have the state of the training, if not said
        otherwise."""
        found = []
        for number in numbers:
            attempt = self.attempts[number] = self.attempts.get(number, 0) + 1
            has = number in self.members if has_state is None else has_state
            self.roster.ready(Ready(number, attempt, version, commits, kept, has), self.now)
            found += self.advance()
        return found

    def end(self, number, code=-9):
        """A process ends."""
        del self.live[number]
        self.roster.ended(number, code, f"ended with {code}", self.now)
        return self.advance()


def formed(actions):
    """Generation and processes of the memberships that were formed."""
    return [action.membership[:2] for action in actions if isinstance(action, Form)]


def kinds(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


@pytest.mark.short
def test_job_starts_with_all_slots_up_to_the_maximum_in_order_of_the_hosts():
    job = Job({"a": 2, "b": 4}, maximum=4)
    assert [(s.process, s.host, s.slot, s.local_slot) for s in job.live.values()] == [
        (0, "a", 0, 0),
        (1, "a", 1, 1),
        (2, "b", 2, 0),
        (3, "b", 3, 1),
    ]
    assert job.ready(2, 0, 3) == []  # waits for the process that is late
    assert formed(job.ready(1)) == [(1, (0, 1, 2, 3))]


@pytest.mark.short
def test_late_process_of_the_first_membership_is_not_waited_for_beyond_the_start_timeout():
    job = Job({"a": 3}, minimum=2)
    job.ready(0, 2)
    assert job.roster.due(job.now) == 10.0
    assert formed(job.advance(10.0)) == [(1, (0, 2))]
    assert job.ready(1) == [Notify(1, HostUpdateResult.added)]


@pytest.mark.short
def test_survivors_go_on_at_once_and_the_replacement_joins_when_they_are_ready_again():
    job = Job({"a": 3}, minimum=2)
    job.ready(0, 1, 2)
    actions = job.end(1)
    # The replacement has the slot of the process that failed.
    assert kinds(actions, Start) == [Start(3, "a", 1, 1, 1)]
    assert formed(job.ready(2)) == []
    assert formed(job.ready(0)) == [(2, (0, 2))]
    assert job.ready(3) == [Notify(2, HostUpdateResult.added)]
    assert formed(job.ready(2)) == []
    assert formed(job.ready(0)) == [(3, (0, 2, 3))]


@pytest.mark.short
def test_survivors_below_the_minimum_wait_for_the_replacement():
    job = Job({"a": 3}, minimum=3)
    job.ready(0, 1, 2)
    job.end(0)
    assert formed(job.ready(1, 2)) == []
    assert formed(job.ready(3)) == [(2, (1, 2, 3))]


@pytest.mark.short
def test_replacement_that_is_ready_before_the_survivors_joins_with_them():
    job = Job({"a": 3}, minimum=2)
    job.ready(0, 1, 2)
    job.end(2)
    assert formed(job.ready(3)) == []
    assert formed(job.ready(1, 0)) == [(2, (0, 1, 3))]


@pytest.mark.short
def test_member_that_does_not_react_to_a_failure_is_killed_and_the_others_go_on():
    job = Job({"a": 3}, minimum=1)
    job.ready(0, 1, 2)
    job.end(2)
    job.ready(1)
    assert job.advance(4.9) == []
    actions = job.advance(0.1)
    assert kinds(actions, Kill) == [Kill(0)]
    assert formed(actions) == [(2, (1,))]
    assert "process 0 (rank 0) on a has not reacted to a failure for 5 s" in job.said
    job.end(0)  # its end is no further failure
    assert job.members == (1,)
    assert formed(job.ready(3, 4)) == []
    assert formed(job.ready(1)) == [(3, (1, 3, 4))]


@pytest.mark.short
def test_job_does_not_end_while_processes_that_were_killed_for_being_late_still_have_their_slots():
    job = Job({"a": 3}, minimum=2)
    job.ready(0, 1, 2)
    job.end(2)
    actions = job.advance(5.0)
    assert kinds(actions, Kill) == [Kill(0), Kill(1)]
    assert job.finish is None
    assert list(job.live) == [0, 1, 3]
    job.end(0)
    job.end(1)
    assert list(job.live) == [3, 4, 5]
    job.ready(3, 4)
    assert formed(job.ready(5)) == [(2, (3, 4, 5))]


@pytest.mark.short
def test_losing_all_members_starts_the_job_again_from_the_program_with_all_processes():
    job = Job({"a": 3})
    job.ready(0, 1, 2)
    for number in (0, 1, 2):
        job.end(number, 1)
    assert sorted(job.live) == [3, 4, 5]
    assert {start.restarts for start in job.live.values()} == {1}
    assert formed(job.ready(3, 5)) == []  # no survivor has a state, so all are waited for
    assert formed(job.ready(4)) == [(2, (3, 4, 5))]


@pytest.mark.short
def test_job_that_loses_all_members_again_and_again_without_progress_ends():
    job = Job({"a": 2})
    for attempt in range(LOSSES_WITHOUT_PROGRESS):
        numbers = sorted(job.live)
        job.ready(*numbers)
        assert job.finish is None
        assert job.generation == attempt + 1
        for number in numbers:
            job.end(number, 3)
    job.ready(*sorted(job.live))
    assert job.finish == Finish(
        3,
        Why.LOSSES,
        "process 4 (rank 0) on a ended with 3",
        process=4,
        count=f"{LOSSES_WITHOUT_PROGRESS} times",
    )
    assert job.finish.text(Terms()) == (
        f"the job has failed {LOSSES_WITHOUT_PROGRESS} times in a row soon after its start; process 4 (rank 0) on a "
        "ended with 3"
    )


@pytest.mark.parametrize("how", ["commit", "time"])
@pytest.mark.short
def test_progress_resets_the_count_of_failures(how):
    job = Job({"a": 2})
    for _ in range(3 * LOSSES_WITHOUT_PROGRESS):
        numbers = sorted(job.live)
        job.ready(*numbers)
        if how == "time":
            job.advance(PROGRESS_SECONDS)
        else:
            job.end(numbers[0])
            job.ready(numbers[1], commits=1)
            numbers = job.members
        for number in numbers:
            job.end(number, 3)
    assert job.finish is None


@pytest.mark.short
def test_survivors_that_fail_again_and_again_without_a_commit_end_the_job():
    job = Job({"a": 2})
    job.ready(0, 1)
    for _ in range(FAILURES_WITHOUT_PROGRESS):
        assert job.finish is None
        victim = job.members[1]
        job.end(victim, -11)
        job.ready(max(job.live))
        job.ready(0)
    assert job.finish.code == 139
    text = job.finish.text(Terms())
    assert f"failed {FAILURES_WITHOUT_PROGRESS} times in a row without a commit" in text


@pytest.mark.short
def test_reset_limit_ends_the_job():
    job = Job({"a": 3}, resets=1)
    job.ready(0, 1, 2)
    job.end(2)
    job.ready(0, 1)
    assert job.generation == 2
    job.end(1)
    job.ready(0)
    assert job.finish == Finish(
        137, Why.RESETS, "process 1 (rank 1) on a ended with -9", process=1, count="1 time"
    )
    assert job.finish.text(COMMAND_LINE) == (
        "the job was formed again 1 time (--reset-limit); process 1 (rank 1) on a ended with -9"
    )
    assert "again 1 time (reset_limit); process" in job.finish.text(Terms())


@pytest.mark.short
def test_host_on_which_processes_fail_before_they_take_part_is_excluded():
    job = Job({"a": 1, "b": 1}, maximum=2)
    job.ready(0)
    for _ in range(STARTS_PER_HOST):
        (number,) = [number for number, start in job.live.items() if start.host == "b"]
        job.end(number, 1)
    assert job.finish is None
    assert job.members == (0,)
    assert [start.host for start in job.live.values()] == ["a"]
    assert "host b gets no new processes for now" in job.said


@pytest.mark.short
def test_job_ends_at_once_if_too_few_processes_are_left_and_no_host_can_come():
    job = Job({"a": 2}, minimum=2, maximum=2)
    for _ in range(STARTS_PER_HOST):
        assert job.finish is None
        job.end(min(job.live), 7)
    assert job.finish == Finish(
        7, Why.TOO_FEW_LEFT, "process 0 on a ended with 7", process=0, count="2 processes"
    )
    assert job.finish.text(COMMAND_LINE) == (
        "fewer than 2 processes (--min-np) are left; process 0 on a ended with 7"
    )


@pytest.mark.parametrize("kind", ["discovery", "cooldown"])
@pytest.mark.short
def test_job_waits_for_hosts_up_to_the_elastic_timeout(kind):
    options = {"hosts_may_come": True} if kind == "discovery" else {"cooldown": (100, 100)}
    job = Job({"a": 1, "b": 1}, minimum=2, maximum=2, **options)
    job.ready(0, 1)
    job.roster.host_lost("b", "no sign of life", job.now)
    job.advance()
    job.ready(0)
    assert job.finish is None
    job.advance(59.0)
    assert job.finish is None
    job.advance(1.0)
    assert job.finish == Finish(
        1,
        Why.TOO_FEW_READY,
        "host b: no sign of life",
        process=None,
        count="2 processes",
        seconds=60.0,
    )
    assert job.finish.text(COMMAND_LINE) == (
        "fewer than 2 processes (--min-np) were ready for 60 s (--elastic-timeout); host b: no sign of life"
    )


@pytest.mark.short
def test_host_comes_back_after_its_cooldown():
    job = Job({"a": 1, "b": 1}, maximum=2, cooldown=(20, 40))
    job.ready(0, 1)
    job.roster.host_lost("a", "the connection was lost", job.now)
    del job.live[0]
    job.advance()
    assert formed(job.ready(1)) == [(2, (1,))]
    assert job.roster.due(job.now) == 20.0
    job.advance(20.0)
    assert [start.host for start in job.live.values()] == ["b", "a"]
    assert job.ready(2) == [Notify(2, HostUpdateResult.added)]


@pytest.mark.short
def test_host_that_is_lost_again_after_each_cooldown_is_one_line_each_time():
    job = Job({"a": 1, "b": 1}, maximum=2, minimum=1, cooldown=(20, 40))
    job.ready(0, 1)
    for number, seconds in ((1, 20.0), (2, 40.0), (3, 40.0)):
        assert job.live[number].host == "b"
        del job.said[:], job.live[number]
        job.roster.host_lost("b", "it refuses", job.now)
        job.advance()
        if number == 1:
            job.ready(0)
        job.advance(seconds)
        assert job.said[0] == "host b: it refuses; it gets no new processes for now"
        assert job.said[1:] == ["the job goes on with 1 process on 1 host"][: number == 1]


@pytest.mark.short
def test_removed_host_leaves_at_the_next_commit_without_counting_as_a_failure():
    job = Job({"a": 1, "b": 2})
    job.ready(0, 1, 2)
    job.discovery.set({"a": 1, "b": 1})
    job.hosts.update_available_hosts()
    assert job.advance() == [Notify(1, HostUpdateResult.removed)]
    actions = job.ready(0, 1, 2)
    assert kinds(actions, Dismiss) == [Dismiss(2, 2, "its slot is gone", is_error=False)]
    assert formed(actions) == [(2, (0, 1))]
    job.end(2, 0)
    assert job.finish is None
    job.end(0, 0)
    job.end(1, 0)
    assert job.finish == Finish()


@pytest.mark.short
def test_process_that_was_told_to_leave_goes_at_the_next_commit_and_its_host_is_spared():
    job = Job({"a": 1, "b": 1, "c": 1}, maximum=2)
    job.ready(0, 1)
    job.roster.leaving(0)
    actions = job.advance()
    assert [start.host for start in kinds(actions, Start)] == ["c"]
    assert kinds(actions, Notify) == [Notify(1, HostUpdateResult.removed)]
    assert job.said == [
        "process 0 (rank 0) on a was told to leave",
        "host a gets no new processes for now",
    ]
    actions = job.ready(0, 1)
    assert formed(actions) == [(2, (1,))]
    assert kinds(actions, Dismiss) == [Dismiss(0, 2, "its slot is gone", is_error=False)]


@pytest.mark.short
def test_process_that_was_told_to_leave_hands_its_state_over_if_it_is_the_only_one():
    job = Job({"a": 1, "b": 1}, maximum=1)
    job.ready(0)
    job.roster.leaving(0)
    assert [start.host for start in kinds(job.advance(), Start)] == ["b"]
    assert job.ready(1) == [Notify(1, HostUpdateResult.added)]
    assert formed(job.ready(0)) == [(2, (0, 1))]
    assert formed(job.ready(0, 1)) == [(3, (1,))]


@pytest.mark.short
def test_removed_host_that_is_lost_before_its_processes_have_left_may_come_back():
    job = Job({"a": 1, "b": 1}, maximum=2)
    job.ready(0, 1)
    job.discovery.set({"a": 1})
    job.hosts.update_available_hosts()
    job.advance()
    job.roster.host_lost("b", "the connection was lost", job.now)
    del job.live[1]
    job.advance()
    job.ready(0)
    assert job.members == (0,)
    job.discovery.set({"a": 1, "b": 1})
    job.hosts.update_available_hosts()
    job.advance()
    assert [start.host for start in job.live.values()] == ["a", "b"]


@pytest.mark.short
def test_removed_hosts_hand_their_state_over_before_they_leave():
    job = Job({"a": 2}, maximum=2)
    job.ready(0, 1)
    job.discovery.set({"b": 2})
    job.hosts.update_available_hosts()
    assert [start.host for start in kinds(job.advance(), Start)] == ["b", "b"]
    assert job.ready(2) == [Notify(1, HostUpdateResult.added)]
    actions = job.ready(0, 1)
    assert formed(actions) == [(2, (0, 2))]  # one that has the state is enough
    assert [dismissed.process for dismissed in kinds(actions, Dismiss)] == [1]
    job.ready(3)
    actions = job.ready(0, 2)
    assert formed(actions) == [(3, (2, 3))]
    assert [dismissed.process for dismissed in kinds(actions, Dismiss)] == [0]


@pytest.mark.short
def test_job_does_not_start_processes_after_one_has_ended_its_program():
    job = Job({"a": 3})
    job.ready(0, 1, 2)
    assert job.end(1, 0) == []
    assert job.end(0, 0) == []
    assert job.end(2, 0) == [Finish()]


@pytest.mark.short
def test_dismissed_process_that_does_not_end_is_killed():
    job = Job({"a": 3}, minimum=2)
    job.ready(0, 1, 2)
    job.end(2)
    job.ready(0, 1)
    job.ready(3)
    job.end(0, 0)
    job.end(1, 0)
    assert job.roster.due(job.now) == 5.0
    assert job.advance(5.0) == [Kill(3)]
    assert job.end(3) == [Finish()]


@pytest.mark.short
def test_newcomer_that_still_starts_when_the_program_ends_is_killed():
    job = Job({"a": 3}, minimum=2)
    job.ready(0, 1, 2)
    job.end(2)
    job.ready(0, 1)
    assert job.end(0, 0) == [Kill(3)]
    job.end(3)
    job.end(1, 0)
    assert job.finish == Finish()


@pytest.mark.short
def test_processes_of_a_program_that_forms_no_job_may_end_one_after_the_other():
    job = Job({"a": 3})
    assert job.end(1, 0) == []
    assert job.end(2, 0) == []
    assert job.end(0, 0) == [Finish()]


@pytest.mark.short
def test_newcomer_that_waits_when_the_program_ends_leaves_without_an_error():
    job = Job({"a": 3}, minimum=2)
    job.ready(0, 1, 2)
    job.end(2)
    job.ready(0, 1)
    job.ready(3)
    assert job.end(0, 0) == [Dismiss(3, 1, "another process has ended its program", is_error=False)]
    job.end(1, 0)
    assert job.finish is None
    job.end(3, 0)
    assert job.finish == Finish()


@pytest.mark.short
def test_failure_after_another_process_has_ended_its_program_is_the_jobs():
    job = Job({"a": 2})
    job.ready(0, 1)
    job.end(0, 0)
    job.end(1, 5)
    assert job.finish == Finish(5, cause="process 1 (rank 1) on a ended with 5", process=1)


@pytest.mark.short
def test_process_with_another_version_is_refused_in_one_line_and_its_host_excluded():
    job = Job({"a": 1, "b": 1}, maximum=2)
    job.ready(0)
    actions = job.ready(1, version="0.9")
    reason = "host b has horoplug 0.9, and the launcher 1.0: all hosts need the same version"
    assert kinds(actions, Dismiss) == [Dismiss(1, 1, reason, is_error=True)]
    assert reason in job.said
    assert formed(actions) == [(1, (0,))]
    job.end(1, 1)
    assert job.finish is None
    assert list(job.live) == [0]


@pytest.mark.short
def test_ready_message_of_an_unknown_process_is_ignored():
    job = Job({"a": 1}, maximum=1)
    job.roster.ready(Ready(77, 1, VERSION, 0, kept=False, has_state=False), job.now)
    assert job.advance() == []


@pytest.mark.short
def test_job_that_was_told_to_end_does_so_at_a_commit_and_starts_nothing_more():
    job = Job({"a": 3}, minimum=2)
    job.ready(0, 1, 2)
    job.roster.notice()
    assert kinds(job.advance(), Notify) == [Notify(1, HostUpdateResult.no_update, ends=True)]
    for number in range(3):
        job.end(number, 0)
    assert job.finish == Finish(ENDED_ON_NOTICE, Why.NOTICED)
    assert job.said == ["the job was told to end"]


@pytest.mark.short
def test_job_that_was_told_to_end_recovers_from_a_failure_first_and_is_told_again():
    job = Job({"a": 3}, minimum=2)
    job.ready(0, 1, 2)
    job.roster.notice()
    job.advance()
    assert kinds(job.end(1), Start) == []
    actions = job.ready(0, 2)
    assert formed(actions) == [(2, (0, 2))]
    assert kinds(actions, Notify)[-1] == Notify(2, HostUpdateResult.no_update, ends=True)
    job.end(0, 0)
    job.end(2, 0)
    assert job.finish.code == ENDED_ON_NOTICE


@pytest.mark.short
def test_job_that_was_told_to_end_needs_no_smallest_number_of_processes():
    job = Job({"a": 3}, minimum=3)
    job.ready(0, 1, 2)
    job.roster.notice()
    job.advance()
    job.end(1)
    assert formed(job.ready(0, 2)) == [(2, (0, 2))]


@pytest.mark.short
def test_job_that_was_told_to_end_and_has_lost_all_processes_ends_with_their_failure():
    job = Job({"a": 2})
    job.ready(0, 1)
    job.roster.notice()
    job.advance()
    job.end(0, 7)
    job.end(1)
    assert job.finish.code == 7
    assert "process 0 (rank 0) on a ended with 7" in job.finish.text(Terms())


@pytest.mark.short
def test_process_that_waits_when_the_job_was_told_to_end_leaves_without_an_error():
    job = Job({"a": 3}, minimum=2)
    job.ready(0, 1, 2)
    job.end(2)
    job.ready(0, 1)
    job.roster.notice()
    job.ready(3)
    actions = job.end(0, 0)
    assert kinds(actions, Dismiss) == [
        Dismiss(3, 1, "another process has ended its program", is_error=False)
    ]
    job.end(1, 0)
    job.end(3, 0)
    assert job.finish.code == ENDED_ON_NOTICE


@pytest.mark.short
def test_slow_process_is_replaced_only_if_another_host_has_a_free_slot():
    job = Job({"a": 3, "b": 1}, maximum=3)
    job.ready(0, 1, 2)
    assert [start.host for start in job.live.values()] == ["a", "a", "a"]
    assert not job.roster.replace(7, "slow")
    job.discovery.set({"a": 4})
    job.hosts.update_available_hosts()
    assert not job.roster.replace(1, "slow")
    assert job.advance() == []
    job.discovery.set({"a": 4, "b": 1})
    job.hosts.update_available_hosts()
    assert job.roster.replace(1, "it is slow")
    assert not job.roster.replace(1, "it is slow")
    actions = job.advance()
    assert [start.host for start in kinds(actions, Start)] == ["b"]
    assert job.said == [
        "process 1 (rank 1) on a is replaced: it is slow",
        "host a gets no new processes for now",
    ]


@pytest.mark.short
def test_process_with_another_state_is_named_and_its_host_excluded():
    job = Job({"a": 2, "b": 1}, minimum=2, maximum=3)
    job.ready(0, 1, 2)
    job.roster.mismatch(2, "the state has no weight")
    job.advance()
    assert job.said == [
        "process 2 (rank 2) on b: the state has no weight",
        "host b gets no new processes for now",
    ]
    assert kinds(job.end(2, 1), Start) == []
    assert formed(job.ready(0, 1)) == [(2, (0, 1))]


# ---- who must synchronise --------------------------------------------------------------------------------------------


@pytest.mark.short
def test_members_that_have_all_stopped_at_the_same_check_need_not_synchronise():
    job = Job({"a": 1, "b": 2})
    job.ready(0, 1, 2)
    assert job.must_sync
    job.discovery.set({"a": 1, "b": 1})
    job.hosts.update_available_hosts()
    job.advance()
    assert formed(job.ready(0, 1, 2, kept=True)) == [(2, (0, 1))]
    assert not job.must_sync


@pytest.mark.short
def test_all_members_must_synchronise_with_a_newcomer_that_was_ready_after_they_were_told_to_stop():
    """They were told that a host has gone. The newcomer on another host is ready when they are."""
    job = Job({"a": 2}, maximum=2)
    job.ready(0, 1)
    job.discovery.set({"a": 1, "b": 1})
    job.hosts.update_available_hosts()
    assert kinds(job.advance(), Notify) == [Notify(1, HostUpdateResult.removed)]
    assert job.ready(2) == []
    assert formed(job.ready(0, 1, kept=True)) == [(2, (0, 2))]
    assert job.must_sync


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.short
def test_all_members_must_synchronise_if_a_failure_has_kept_one_from_the_stop(late):
    """Process 3 dies after the others were told where to stop. One has not been there yet, and has restored the commit
    before."""
    job = Job({"a": 2, "b": 3}, maximum=5)
    job.ready(0, 1, 2, 3, 4)
    job.discovery.set({"a": 2, "b": 2})
    job.hosts.update_available_hosts()
    job.advance()
    job.ready(*({0, 1, 2, 4} - {late}), kept=True)
    job.end(3)
    assert formed(job.ready(late)) == [(2, (0, 1, 2, 4))]
    assert job.must_sync
    job.roster.leaving(4)
    job.advance()
    assert formed(job.ready(0, 1, 2, 4, kept=True)) == [(3, (0, 1, 2))]
    assert not job.must_sync


@pytest.mark.short
def test_state_is_that_of_a_survivor_that_has_received_it():
    """Process 0 dies while the others receive its state, which only process 2 has received."""
    job = Job({"a": 3}, minimum=1)
    job.ready(0)
    job.advance(10.0)
    job.ready(1, 2)
    assert formed(job.ready(0, kept=True)) == [(2, (0, 1, 2))]
    job.end(0)
    job.ready(1, has_state=False)
    assert formed(job.ready(2)) == [(3, (2, 1))]
    assert job.must_sync


@pytest.mark.short
def test_survivor_that_has_the_state_stays_for_it_although_its_slot_is_gone():
    job = Job({"a": 1, "b": 1, "c": 1}, minimum=1)
    job.ready(0)
    job.advance(10.0)
    job.ready(1, 2)
    job.ready(0, kept=True)
    job.discovery.set({"b": 1})
    job.hosts.update_available_hosts()
    job.end(0)
    job.ready(1, has_state=False)
    assert formed(job.ready(2)) == [(3, (2, 1))]
    job.ready(1, kept=True)
    assert formed(job.ready(2, kept=True))[-1:] == [(4, (1,))]


@pytest.mark.short
def test_ready_message_that_comes_again_or_late_is_ignored():
    job = Job({"a": 2}, minimum=2, maximum=2)
    job.ready(0, 1)
    for number in (0, 1):
        job.roster.ready(Ready(number, 1, VERSION, 1, kept=True, has_state=True), job.now)
        assert job.advance() == []
    job.ready(0)
    job.roster.ready(Ready(1, 1, VERSION, 1, kept=True, has_state=True), job.now)
    assert job.advance() == []
    assert formed(job.ready(1)) == [(2, (0, 1))]


# ---- random jobs -----------------------------------------------------------------------------------------------------


class Ended(Exception):
    """The roster has ended the job, because it failed too often, or was told to end."""


class Simulation:
    """A job whose processes and hosts behave at random until a moment, and then well."""

    CALM = 400.0  # seconds

    def __init__(self, number):
        self.random = random.Random(number)
        draw = self.random
        self.maximum = draw.randint(1, 6)
        self.minimum = draw.randint(1, self.maximum)
        self.names = [chr(ord("a") + i) for i in range(draw.randint(1, 4))]
        hosts = {name: draw.randint(1, 4) for name in self.names}
        hosts["a"] = max(hosts["a"], self.minimum)  # so that the job can always go on
        self.events = []
        self.order = itertools.count()
        self.busy = {}  # by process: what it does now; a change cancels its events
        self.before = ()
        self.states = {}  # by process: the state of the training that it has
        self.kept = set()  # the processes that have it since they have stopped
        self.receiving = {}  # by member: the state that it had before, while it may still be receiving rank 0's
        self.updates = itertools.count(1)
        self.messages = []  # that were sent already
        self.noticed = False
        self.job = Job(
            hosts,
            minimum=self.minimum,
            maximum=self.maximum,
            cooldown=(5, 20),
            hosts_may_come=True,
            wait=10_000.0,
        )
        self.adopt()
        for _ in range(draw.randint(0, 12)):
            self.at(draw.uniform(0, self.CALM), self.disturb)
        self.told = draw.random() < 0.3
        if self.told:
            self.at(draw.uniform(0, 1.2 * self.CALM), self.tell)

    def tell(self):
        self.noticed = True
        self.job.roster.notice()
        self.handle(self.job.advance())

    def at(self, time, action, *args):
        heapq.heappush(self.events, (time, next(self.order), action, args))

    def adopt(self):
        """Let processes that were started become ready after a while, and members train."""
        for number in self.job.live:
            if number not in self.busy:
                self.busy[number] = "starting"
                self.later(number, self.random.uniform(0.5, 15), self.become_ready)

    def later(self, number, seconds, action):
        state = self.busy[number]
        self.at(self.job.now + seconds, self.if_still, number, state, action)

    def if_still(self, number, state, action):
        if self.busy.get(number) is state and number in self.job.live:
            action(number)

    def become_ready(self, number):
        self.busy[number] = object()
        has_state = self.states.get(number) is not None
        ready = {"kept": number in self.kept, "has_state": has_state}
        actions = self.job.ready(number, commits=self.random.randint(0, 1), **ready)
        self.messages.append(Ready(number, self.job.attempts[number], VERSION, 1, **ready))
        self.handle(actions)

    def handle(self, actions):
        job = self.job
        for action in actions:
            match action:
                case Form(Membership(_, members, must_sync), _):
                    self.check_membership(members)
                    self.synchronise(members, must_sync)
                    for number in members:
                        self.busy[number] = "training"
                case Notify(generation, _, ends=True):
                    if generation == job.generation:
                        for number in job.members:
                            self.end_program(number)
                case Notify(generation, change):
                    if change and generation == job.generation:
                        # All stop at the same commit, each a little later than the one before.
                        after = job.now + self.random.uniform(0, 20)
                        state = f"step {next(self.updates)}"
                        for number in job.members:
                            moment = after + self.random.uniform(0, 0.5)
                            self.at(moment, self.stop, number, generation, state)
                case Kill(number):
                    self.handle(job.end(number))
                case Dismiss(number, _, _, is_error):
                    assert not is_error
                    self.busy[number] = "leaving"
                    self.later(number, 1, lambda n: self.handle(job.end(n, 0)))
        used = {}
        for start in job.live.values():
            used.setdefault(start.host, []).append(start.local_slot)
        slots = [start.slot for start in job.live.values()]
        assert len(slots) == len(set(slots))
        for host, numbers in used.items():
            assert len(numbers) == len(set(numbers)), host
        if job.finish is not None:  # random failures can look like a program that always fails
            assert self.told or "times in a row" in job.finish.text(Terms())
            raise Ended
        self.adopt()

    def synchronise(self, members, must_sync):
        """A membership begins. Members must have the same state; rank 0 gives it to the others if they need it."""
        states = [self.states.get(number) for number in members]
        if must_sync:
            # Nothing is lost: rank 0 has a state if any has one. Else it begins with its own.
            assert states[0] is not None or not any(states)
            self.receiving = dict(zip(members, states, strict=True))
            self.states |= dict.fromkeys(members, states[0] or f"begin {next(self.updates)}")
        else:
            assert states[0] is not None
            assert set(states) == {states[0]}
            self.receiving = {}
        self.kept.clear()
        self.at(self.job.now + 1, self.receive, self.job.generation)

    def receive(self, generation):
        """All members have the state of rank 0."""
        if generation == self.job.generation:
            self.receiving = {}

    def stop(self, number, generation, state):
        """A member stops at the commit at which all of its membership do, and keeps the state that it has there."""
        if generation == self.job.generation and self.busy.get(number) == "training":
            if self.receiving:  # it has not begun to train
                self.at(self.job.now + 1, self.stop, number, generation, state)
                return
            self.states[number] = state
            self.kept.add(number)
            self.leave(number)

    def restore(self, number):
        """An operation of a member has failed: it restores the state of a commit, which may be another one on each."""
        self.kept.discard(number)
        if number in self.receiving:
            if self.random.random() < 0.5:
                self.states[number] = self.receiving[number]
        elif self.random.random() < 0.5:
            self.states[number] += " restored"

    def leave(self, number, *, fails=False):
        """A member notices that its membership is over, and wants to take part in the next one; some are late."""
        if number in self.job.live and self.busy.get(number) == "training":
            if fails:
                self.restore(number)
            self.busy[number] = object()
            stuck = self.job.now < self.CALM and self.random.random() < 0.05
            seconds = self.random.uniform(10, 100) if stuck else self.random.uniform(0, 2)
            self.later(number, seconds, self.become_ready)

    def end_program(self, number):
        if number in self.job.live and self.busy.get(number) == "training":
            self.busy[number] = object()
            self.later(number, self.random.uniform(0, 2), lambda n: self.handle(self.job.end(n, 0)))

    def check_membership(self, members):
        job = self.job
        assert len(set(members)) == len(members)
        assert (1 if self.noticed else self.minimum) <= len(members)
        assert set(members) <= job.live.keys()
        survivors = [number for number in members if number in self.before]
        assert list(members[: len(survivors)]) == survivors
        order = [number for number in self.before if number in members]
        assert survivors == sorted(order, key=lambda number: self.states.get(number) is None)
        self.before = members

    def fail(self, number):
        was_member = number in self.job.members and self.busy.get(number) == "training"
        self.handle(self.job.end(number, self.random.choice([-9, 1, 137])))
        if was_member:
            for other in self.job.members:
                self.leave(other, fails=True)

    def disturb(self):
        job, draw = self.job, self.random
        kind = draw.choice(["kill", "kill", "kill two", "host", "slots", "leave", "message"])
        if kind == "message":
            if self.messages:
                job.roster.ready(draw.choice(self.messages), job.now)
                self.handle(job.advance())
        elif kind == "host":
            name = draw.choice(self.names)
            gone = [number for number, start in job.live.items() if start.host == name]
            job.roster.host_lost(name, "is lost", job.now)
            for number in gone:
                del job.live[number]
            self.handle(job.advance())
            for other in job.members:
                self.leave(other, fails=True)
        elif kind == "leave":
            if job.live:
                job.roster.leaving(draw.choice(sorted(job.live)))
                self.handle(job.advance())
        elif kind == "slots":
            hosts = {name: draw.randint(0, 4) for name in self.names}
            hosts["a"] = max(hosts["a"], self.minimum)
            job.discovery.set(hosts)
            job.hosts.update_available_hosts()
            self.handle(job.advance())
        else:
            for _ in range(2 if kind == "kill two" else 1):
                if job.live:
                    self.fail(draw.choice(sorted(job.live)))

    def run(self):
        job = self.job
        while True:
            due = job.roster.due(job.now)
            time = self.events[0][0] if self.events else None
            nearest = min((t for t in (due, time) if t is not None), default=None)
            if nearest is None or nearest > 10 * self.CALM:
                return
            if time is not None and time <= nearest:
                _, _, action, args = heapq.heappop(self.events)
                job.now = max(job.now, time)
                action(*args)
            else:
                job.now = max(job.now, due)
            self.handle(job.advance())


@pytest.mark.short
def test_random_jobs_reach_their_full_size_after_the_last_failure():
    first, ended = seed(), 0
    for number in range(first, first + 1500):
        simulation = Simulation(number)
        try:
            simulation.run()
            assert not simulation.told  # otherwise the job has ended
            job = simulation.job
            available = job.hosts.current_hosts
            assert not any(map(job.hosts.is_blacklisted, available.host_slots))
            wanted = min(simulation.maximum, available.count_available_slots())
            assert len(job.members) == wanted
            assert set(job.members) == job.live.keys()
            used = [start.host for start in job.live.values()]
            assert all(used.count(host) <= available.get_slots(host) for host in set(used))
        except AssertionError:
            print(f"simulation {number}")
            raise
        except Ended:
            ended += not simulation.told
    assert ended < 150


@pytest.mark.short
def test_job_of_a_thousand_processes_is_formed_again_and_again():
    job = Job({f"host{i}": 8 for i in range(128)}, maximum=1024)
    for generation in (1, 2, 3):
        for number in job.live:
            job.attempts[number] = generation
            ready = Ready(number, generation, VERSION, 1, kept=False, has_state=True)
            job.roster.ready(ready, job.now)
        job.advance()
        assert (job.generation, job.members) == (generation, tuple(range(1024)))
