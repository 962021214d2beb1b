"""The tables that rank 0 makes of the records of all ranks. They contain, in few bytes, what each rank needs to
connect."""

from __future__ import annotations

from collections.abc import Sequence

from horoplug.base import cgroup
from horoplug.rendezvous.connections.records import Record


def table_of_ranks(records: dict[int, Record]) -> Record:
    """The table of what every rank needs to know about all others.

    ``hosts``: the index of each rank's host; ``by_host``: for each host, the name of the hub's Unix listener, the
    processors that the host's ranks may use together, as ranges, and the CPU time per second that they may use together
    (0: no limit)."""
    numbers: dict[str, int] = {}
    hosts: list[int] = []
    hubs: list[str] = []
    processors: list[set[int]] = []
    quotas: list[list[cgroup.Limits]] = []
    for rank in range(len(records)):
        record = records[rank]
        host = numbers.setdefault(str(record["host"]), len(numbers))
        hosts.append(host)
        if host == len(hubs):
            hubs.append(str(record["unix"]))
            processors.append(set())
            quotas.append([])
        processors[host].update(map(int, record.get("processors", ())))
        quotas[host].append(record.get("quotas", {}))
    by_host = [
        {"unix": hub, "processors": _ranges(sorted(cpus)), "quota": cgroup.quota(limits)}
        for hub, cpus, limits in zip(hubs, processors, quotas, strict=True)
    ]
    return {"hosts": hosts, "by_host": by_host, "nonce": records[0].get("nonce")}


def table_of_addresses(records: dict[int, Record]) -> Record:
    """The table of listeners: rank r listens at ``addresses[of[r]]``, port ``ports[r]``."""
    numbers: dict[str, int] = {}
    of = [numbers.setdefault(str(records[r]["address"]), len(numbers)) for r in sorted(records)]
    ports = [int(records[r]["port"]) for r in sorted(records)]
    return {"addresses": list(numbers), "of": of, "ports": ports}


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """The first and last number of each run of consecutive numbers."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found
