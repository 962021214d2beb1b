"""How the processes of an elastic job and its launcher agree on memberships, through the launcher's store.

Every process has a number for its whole life, which the launcher never gives to another one. A *membership* is the list
of processes that form the job for a while; the index of a process is its rank, and the number of the membership is its
*generation*. A process that wants to take part in the next membership says so, and waits for an answer:

    process                                      launcher
    elastic/process/<process>/ready     ->
                                        <-       elastic/answer/<process>/<attempt>

While a membership lasts, its rank 0 keeps a get of ``elastic/update/<generation>`` pending, which the launcher sets
when processes should come or go. Nobody else sends anything meanwhile, except that a process that was told to leave
sets ``elastic/process/<process>/leaving``. All values are JSON.

The launcher decides (horoplug/runner/elastic/roster.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Final, NamedTuple

from horoplug.base.errors import ProtocolError, RendezvousError
from horoplug.base.host_updates import HostUpdateResult
from horoplug.rendezvous.store.client import PendingGet, StoreClient

FROM_PROCESSES: Final = "elastic/process/"
"""The beginning of the keys that processes set for the launcher."""
_FOREVER: Final = 1e6  # seconds, 11 days: the launcher answers earlier, or its connection ends


class Membership(NamedTuple):
    """The processes that form the job, by rank."""

    generation: int
    processes: tuple[int, ...]


class HostUpdate(NamedTuple):
    """Hosts have changed at ``timestamp`` (seconds)."""

    timestamp: float
    change: HostUpdateResult


@dataclasses.dataclass(frozen=True)
class Ready:
    """A process is ready for the next membership.

    ``attempt``: how often it has been ready, from 1; ``version``: of its horoplug; ``commits``: how often its program
    has committed a state since the answer before."""

    process: int
    attempt: int
    version: str
    commits: int


@dataclasses.dataclass(frozen=True)
class Leaving:
    """A process was told to leave, for example because its host is about to be taken away."""

    process: int


def pack_message(message: Ready | Leaving) -> bytes:
    """The value that a process sets for the launcher."""
    return json.dumps(dataclasses.asdict(message)).encode()


def unpack_message(value: bytes) -> Ready | Leaving:
    """Read what a process has set. Errors: ProtocolError."""
    try:
        fields = json.loads(value)
        process = int(fields["process"])
        if "attempt" not in fields:
            return Leaving(process)
        return Ready(
            process, int(fields["attempt"]), str(fields["version"]), int(fields["commits"])
        )
    except (ValueError, KeyError, TypeError):
        raise ProtocolError("a process has sent the launcher something unreadable") from None


def answer_key(process: int, attempt: int) -> str:
    """The key of the answer to a process."""
    return f"elastic/answer/{process}/{attempt}"


def update_key(generation: int) -> str:
    """The key that tells a membership that processes should come or go."""
    return f"elastic/update/{generation}"


def pack_membership(membership: Membership) -> bytes:
    """The answer to a member."""
    return json.dumps(
        {"generation": membership.generation, "processes": membership.processes}
    ).encode()


def pack_dismissal(reason: str, *, is_error: bool) -> bytes:
    """The answer to a process that does not take part any more. ``is_error``: whether its program should fail."""
    return json.dumps({"error" if is_error else "leave": reason}).encode()


def pack_update(update: HostUpdate) -> bytes:
    """The value of :func:`update_key`."""
    return json.dumps({"timestamp": update.timestamp, "change": int(update.change)}).encode()


class DismissedError(RendezvousError):
    """The launcher does not need this process any more; it should end without an error."""


class ElasticMember:
    """A process of an elastic job: its conversation with the launcher."""

    def __init__(self, store: StoreClient, process: int, version: str) -> None:
        """``process``: the number that the launcher has given this process; ``version``: of its horoplug."""
        self._store = store
        self._process = process
        self._version = version
        self._attempt = 0
        self._leaving = False
        self._pending: PendingGet | None = None

    def join(self, commits: int) -> Membership:
        """Wait until this process is a member of the next membership, for as long as the launcher lives.

        ``commits``: how often the program has committed a state since the last call. Errors: DismissedError if the
        process is not needed any more; RendezvousError if the launcher refuses it, or has ended."""
        self._stop_watching()
        self._attempt += 1
        ready = Ready(self._process, self._attempt, self._version, commits)
        key = answer_key(self._process, self._attempt)
        self._store.set(f"{FROM_PROCESSES}{self._process}/ready", pack_message(ready))
        (value,) = self._store.get([key], _FOREVER)
        self._store.delete(key)
        answer = json.loads(value)
        if "leave" in answer:
            raise DismissedError(answer["leave"])
        if "error" in answer:
            raise RendezvousError(answer["error"])
        membership = Membership(answer["generation"], tuple(answer["processes"]))
        if membership.processes[0] == self._process:
            self._pending = self._store.begin_get([update_key(membership.generation)], _FOREVER)
        return membership

    def leave(self) -> None:
        """Tell the launcher, once, that this process was told to leave. Errors: RendezvousError."""
        if not self._leaving:
            self._leaving = True
            message = pack_message(Leaving(self._process))
            self._store.set(f"{FROM_PROCESSES}{self._process}/leaving", message)

    def update(self) -> HostUpdate | None:
        """The launcher's notification, once, if it has arrived since the last :meth:`join`; only on rank 0."""
        if self._pending is None:
            return None
        try:
            values = self._store.poll_get(self._pending)
        except RendezvousError:
            self._pending = None  # the launcher has ended, which other parts report
            return None
        if values is None:
            return None
        self._pending = None
        fields = json.loads(values[0])
        return HostUpdate(fields["timestamp"], HostUpdateResult(fields["change"]))

    def _stop_watching(self) -> None:
        if self._pending is not None:
            with contextlib.suppress(RendezvousError):
                self._store.abandon(self._pending)
            self._pending = None
