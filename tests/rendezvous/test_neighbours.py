"""The ranks on other hosts that a rank of a large job connects to at the start."""

import itertools
import math
import random

import pytest

from horoplug.rendezvous.connections.neighbours import neighbours
from tests.harness.support import seed


def graph(hosts):
    """By rank, its neighbours."""
    return [neighbours(rank, hosts) for rank in range(len(hosts))]


def is_connected(hosts, edges, removed=None):
    """Whether the ranks without ``removed`` reach each other, if the ranks of a host are connected with each other."""
    ranks = [rank for rank in range(len(hosts)) if rank != removed]
    reached, waiting = {ranks[0]}, [ranks[0]]
    while waiting:
        rank = waiting.pop()
        near = edges[rank] | {other for other in ranks if hosts[other] == hosts[rank]}
        for other in near - reached - {removed}:
            reached.add(other)
            waiting.append(other)
    return len(reached) == len(ranks)


def check(hosts):
    edges = graph(hosts)
    count = len(set(hosts))
    for rank, near in enumerate(edges):
        assert all(hosts[other] != hosts[rank] for other in near), hosts
        assert all(rank in edges[other] for other in near), f"not symmetric: {hosts}"
        assert len(near) <= 3 * math.ceil(math.log2(count)) + 2 + 9 if count > 1 else not near
    if count > 1:
        assert is_connected(hosts, edges)
        if len(hosts) > 2:
            assert all(is_connected(hosts, edges, rank) for rank in range(len(hosts))), hosts


def test_small_jobs_stay_connected_without_any_one_rank():
    for size in range(1, 6):
        for hosts in itertools.product(range(size), repeat=size):
            check(hosts)


def test_random_jobs_with_uneven_hosts():
    chance = random.Random(seed())
    for _ in range(60):
        count = chance.randint(1, 40)
        hosts = [host for host in range(count) for _ in range(chance.choice([1, 1, 2, 3, 8]))]
        if chance.random() < 0.5:
            chance.shuffle(hosts)
        check(hosts)


@pytest.mark.parametrize("hosts", [16, 1000, 4096])
def test_number_of_neighbours_grows_logarithmically(hosts):
    by_rank = list(range(hosts))
    for rank in (0, 1, hosts // 2, hosts - 1):
        assert len(neighbours(rank, by_rank)) <= 3 * math.log2(hosts) + 11


def test_neighbours_are_the_partners_of_the_algorithms():
    """Eleven hosts with two ranks each; host x has ranks 2 x and 2 x + 1."""
    hosts = [rank // 2 for rank in range(22)]
    ring = {1, 2, 4, 8, 10, 9, 7, 3}
    doubling = {1, 2, 4, 7}  # 0 and 1, 2 and 3, 4 and 5 form pairs
    tree = set(range(1, 9))
    assert neighbours(0, hosts) == {2 * host for host in ring | doubling | tree} | {21}
    # Host 9: distances 1, 2, 4, 8; in doubling, the hosts 10, 7 and the pair of 4 and 5; its parent is host 1.
    partners = {10, 8, 0, 7, 2, 5, 6, 1} | {10, 7, 4}
    assert neighbours(18, hosts) == {2 * host for host in partners | {1}} | {17}
    assert neighbours(19, hosts) == {2 * host + 1 for host in partners} | {20}
    assert neighbours(0, [0, 0, 0]) == set()
