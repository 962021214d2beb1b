"""Decides which agents the launcher starts by ssh itself, and which ones are started by agents of other hosts.

Without I/O. Jobs on many hosts start their agents as a tree, so that the connections, processes and processor time of
ssh are spread over the hosts."""

from __future__ import annotations

MOST_DIRECT = 64
"""Up to this number of other hosts, the launcher starts all agents itself."""
FAN_OUT = 32
"""In a tree, the largest number of agents that the launcher, or an agent, starts."""


def parents(
    hosts: int, most_direct: int | None = None, fan_out: int | None = None
) -> list[int | None]:
    """For each of a number of hosts, the host whose agent starts its agent; None for the launcher.

    A parent precedes its children. The tree has as few levels as the fan-out permits, and the hosts of a level are
    spread evenly over those of the level above. ``most_direct`` and ``fan_out`` are :data:`MOST_DIRECT` and
    :data:`FAN_OUT` by default."""
    most_direct = MOST_DIRECT if most_direct is None else most_direct
    fan_out = FAN_OUT if fan_out is None else fan_out
    if hosts <= most_direct:
        return [None] * hosts
    found: list[int | None] = [None] * min(fan_out, hosts)
    above = range(len(found))  # the last complete level
    while len(found) < hosts:
        width = min(len(above) * fan_out, hosts - len(found))
        first = len(found)
        found += [above[number % len(above)] for number in range(width)]
        above = range(first, len(found))
    return found
