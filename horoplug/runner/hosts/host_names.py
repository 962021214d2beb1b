"""The rule for what a host is: a machine, whatever it is called. A job calls it by the name that it has seen first, and
the slots of all its names add up.

Which machine a name means is told by

- the launcher (hosts.py), for ``-H``, hostfiles, schedulers and discovery scripts: all names of the launcher's own
  machine mean one host; other names are the same if they differ in case, in a final dot or in how an IPv6 address is
  written. Two names of another machine stay two hosts, because only ssh knows where a name leads;
- Ray's cluster (horoplug/ray/discovery.py): a host is a node;
- the tasks of Spark themselves (horoplug/spark/tasks.py): a host is what they share memory on."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Hashable, Iterable, Mapping

Identify = Callable[[list[str]], Mapping[str, Hashable]]
"""Says which machine each name means; None: there is no such machine."""


class HostNames:
    """One name for each machine. It remembers the names of the machines that it has seen last."""

    def __init__(self, identify: Identify) -> None:
        self._identify = identify
        self._names: dict[Hashable, str] = {}

    def merge(self, hosts: Iterable[tuple[str, int]]) -> dict[str, int]:
        """The slots of each machine, from names with slots. Names without a machine are left out."""
        given = list(hosts)
        machines = self._identify(list(dict.fromkeys(name for name, _ in given)))
        # A name that now means another machine is that one's.
        before = {m: name for m, name in self._names.items() if machines.get(name, m) == m}
        self._names = {}
        slots: dict[str, int] = {}
        for name, count in given:
            machine = machines[name]
            if machine is not None:
                known = self._names.setdefault(machine, before.get(machine, name))
                slots[known] = slots.get(known, 0) + count
        return slots


def spelled_alike(names: Iterable[str]) -> dict[str, Hashable]:
    """For each name, a text that is equal for names that differ only in their spelling."""
    return {name: _spelled(name) for name in names}


def _spelled(name: str) -> str:
    user, at, host = name.rpartition("@")
    try:
        host = ipaddress.IPv6Address(host).compressed
    except ValueError:
        host = host.lower().removesuffix(".")
    return user + at + host
