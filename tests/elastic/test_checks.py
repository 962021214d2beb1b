"""Commits that follow each other fast do not all check for new hosts, and all ranks skip the same ones."""

import itertools

import pytest

from horoplug.base.errors import HostsUpdatedInterrupt
from horoplug.base.host_updates import HostUpdateResult
from horoplug.common import elastic


class Ranks:
    """Two states, of which the second one receives what the first one, on rank 0, has broadcast. Time is simulated."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.sent = []
        monkeypatch.setattr(elastic.time, "monotonic", lambda: self.now)
        self.states = [self._state(self.sent.append), self._state(None)]

    def _state(self, send):
        def broadcast(value):
            if send is not None:
                send(value)
            return self.sent[-1]

        return elastic.ObjectState(broadcast, lambda: 0)

    def commit(self, seconds):
        """Both ranks commit after this time. Returns whether they have checked, and whether they were interrupted."""
        self.now += seconds
        before = len(self.sent)
        interrupted = []
        for state in self.states:
            try:
                state.commit()
                interrupted.append(False)
            except HostsUpdatedInterrupt:
                interrupted.append(True)
        assert interrupted[0] == interrupted[1]
        return len(self.sent) > before, interrupted[0]


def test_slow_commits_all_check(monkeypatch):
    ranks = Ranks(monkeypatch)
    assert all(ranks.commit(0.2) == (True, False) for _ in range(50))


@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.03])
def test_fast_commits_check_every_tenth_of_a_second_or_50_commits(monkeypatch, seconds):
    ranks = Ranks(monkeypatch)
    checked = [ranks.commit(seconds)[0] for _ in range(1000)]
    assert all(checked[: elastic.CHECKS_AT_FIRST])
    at = [i for i, each in enumerate(checked) if each]
    longest = max(b - a for a, b in itertools.pairwise(at))
    wanted = min(elastic.CHECK_SECONDS / seconds, elastic.MOST_UNCHECKED)
    assert wanted - 1 <= longest <= wanted + 2


def test_all_ranks_are_interrupted_by_the_same_commit(monkeypatch):
    ranks = Ranks(monkeypatch)
    for _ in range(1000):
        ranks.commit(0.01)
    ranks.states[0].on_hosts_updated(5.0, HostUpdateResult.added)
    outcomes = [ranks.commit(0.01)[1] for _ in range(60)]
    assert outcomes.count(True) == 1
    for state in ranks.states:
        state.on_reset()
    assert [ranks.commit(0.01)[0] for _ in range(10)] == [True] * 10


def test_commits_that_become_slow_are_soon_all_checked(monkeypatch):
    ranks = Ranks(monkeypatch)
    for _ in range(500):
        ranks.commit(0.001)
    checked = [ranks.commit(1.0)[0] for _ in range(2 * elastic.MOST_UNCHECKED)]
    assert all(checked[elastic.MOST_UNCHECKED + 10 :])
