"""Which agents the launcher starts itself, and which ones are started by agents of other hosts."""

import collections

import pytest

from horoplug.runner.start.spawn_tree import FAN_OUT, MOST_DIRECT, parents


def depths(tree):
    """The number of agents above each host."""
    found = []
    for parent in tree:
        found.append(0 if parent is None else found[parent] + 1)
    return found


def test_launcher_starts_all_agents_of_a_small_job():
    assert parents(0) == []
    assert parents(MOST_DIRECT) == [None] * MOST_DIRECT


def test_tree_with_a_small_fan_out():
    assert parents(7, most_direct=2, fan_out=2) == [None, None, 0, 1, 0, 1, 2]
    assert parents(3, most_direct=2, fan_out=4) == [None] * 3


@pytest.mark.parametrize("hosts", [MOST_DIRECT + 1, 100, 500, FAN_OUT + FAN_OUT**2, 3000])
def test_no_host_starts_more_agents_than_the_fan_out(hosts):
    tree = parents(hosts)
    assert len(tree) == hosts
    assert all(parent is None or parent < number for number, parent in enumerate(tree))
    starts = collections.Counter(tree)
    assert starts[None] == max(starts.values()) == FAN_OUT
    assert max(depths(tree)) == (1 if hosts <= FAN_OUT + FAN_OUT**2 else 2)


def test_hosts_of_a_level_are_spread_evenly():
    starts = collections.Counter(parents(100))
    del starts[None]
    assert set(starts.values()) <= {2, 3}
    assert sum(starts.values()) == 100 - FAN_OUT


def test_chain():
    assert parents(4, most_direct=1, fan_out=1) == [None, 0, 1, 2]
