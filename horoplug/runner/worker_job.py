"""A job whose processes are started by something else than the launcher's agents: actors of Ray or tasks of Spark.

The caller learns on which host each worker runs. :class:`WorkerJob` then assigns the ranks, serves the rendezvous in
the caller's process, and has the variables that each worker sets before its program calls ``init()``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

from horoplug.base.variables import SECRET_BYTES
from horoplug.rendezvous.store.server import StoreServer

from .environment import (
    DECIDED,
    common_environment,
    give_threads,
    job_environment,
    rank_environment,
)
from .hosts.hosts import Placement, local_and_cross_ranks

if TYPE_CHECKING:
    from typing_extensions import Self


class ServedJob:
    """A job whose rendezvous is served in this process. A context manager."""

    def __init__(
        self,
        address: str | None,
        settings: Mapping[str, str] | None,
        interface: str | None,
        secret: bytes | None,
    ) -> None:
        """``address``: the address of this process that all workers reach, None: all are on this host; ``settings``:
        variables of horoplug for all ranks, without prefix; ``interface``: the network interface on which the ranks
        listen, None: any; ``secret``: the job's, None: a new one. Errors: OSError if the address cannot be bound."""
        self._common = common_environment({}, settings or {})
        self._interface = interface
        self._secret = secret or secrets.token_bytes(SECRET_BYTES)
        self._server = StoreServer(self._secret, address)

    def _environment(self, size: int, host: str | None) -> dict[str, str]:
        """The variables of all workers on a host. ``host``: None: there is no other one."""
        return job_environment(
            self._common,
            size=size,
            server=self._server.address,
            secret=self._secret,
            host=host,
            interface=self._interface,
        )

    def close(self) -> None:
        """Stop serving the rendezvous. Idempotent."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WorkerJob(ServedJob):
    """The ranks and the rendezvous of workers whose number is fixed."""

    def __init__(
        self,
        hosts: Sequence[str],
        address: str | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        interface: str | None = None,
        secret: bytes | None = None,
        keep_order: bool = False,
    ) -> None:
        """``hosts``: for each worker, a name that only the workers of its host have. The other arguments are those of
        :class:`ServedJob`.

        Ranks fill one host after the other, in the order in which the hosts appear in ``hosts``; with ``keep_order``,
        the ranks are the indices of the workers. Errors: OSError if the address cannot be bound."""
        super().__init__(address, settings, interface, secret)
        workers: dict[str, list[int]] = {}
        for worker, host in enumerate(hosts):
            workers.setdefault(host, []).append(worker)
        grouped = [worker for group in workers.values() for worker in group]
        self.by_rank = list(range(len(hosts))) if keep_order else grouped
        """The worker that has each rank."""
        self.ranks = [0] * len(hosts)
        """The rank of each worker."""
        for rank, worker in enumerate(self.by_rank):
            self.ranks[worker] = rank
        self._placements = [
            Placement(host, False, tuple(self.ranks[worker] for worker in group))
            for host, group in workers.items()
        ]
        self._numbers = local_and_cross_ranks(self._placements)
        self._hosts = hosts

    def environment(self, worker: int) -> dict[str, str]:
        """The variables of a worker, which :func:`enter` sets. They include the job's secret: pass them to the worker
        by an authenticated connection, and not by a command line or a page that others can read."""
        rank = self.ranks[worker]
        host = self._hosts[worker] if len(self._placements) > 1 else None
        env = self._environment(len(self._hosts), host)
        return env | rank_environment(rank, self._numbers[rank])

    def lost(self, worker: int, reason: str) -> None:
        """Tell ranks that are still connecting to each other that a worker has ended. ``reason``: one line."""
        rank = self.ranks[worker]
        self._server.mark_lost(rank, f"rank {rank} {reason}")

    def departures(self) -> list[int]:
        """Ranks in the order in which they have left the rendezvous or were lost."""
        return self._server.departures()

    def present(self) -> int:
        """Number of ranks that are connected to the rendezvous."""
        return self._server.present()


def enter(
    variables: Mapping[str, str], environment: MutableMapping[str, str] = os.environ
) -> dict[str, str | None]:
    """Set the variables of :meth:`WorkerJob.environment` in a worker, before it calls ``init()``.

    Variables of an earlier job in the same process are removed. Returns what :func:`leave` restores: the former value
    of each variable, None for one that was not set. Errors: ValueError for an invalid variable."""
    removed = {f"{prefix}{name}" for name in DECIDED for prefix in ("HOROPLUG_", "HOROVOD_")}
    earlier = dict(environment)
    wanted = {name: earlier[name] for name in earlier.keys() - removed} | dict(variables)
    give_threads(wanted)
    changed = {name for name in earlier.keys() | wanted if earlier.get(name) != wanted.get(name)}
    leave({name: wanted.get(name) for name in changed}, environment)
    return {name: earlier.get(name) for name in changed}


def leave(
    before: Mapping[str, str | None], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Restore the environment of a worker that has left its job, since Ray and Spark use their processes again.
    ``before``: the result of :func:`enter`."""
    for name, value in before.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
