"""What the processes of an elastic job and its launcher tell each other, through the launcher's store.

Every process has a number for its whole life, which the launcher never gives to another one. A *membership* is the list
of processes that form the job for a while; the index of a process is its rank, and the number of the membership is its
*generation*. A process that wants to take part in the next membership says so, and waits for an answer:

    process                                      launcher
    elastic/process/<process>/ready     ->
                                        <-       elastic/answer/<process>/<attempt>

When processes should come or go while a membership lasts, its members agree at which of their checks they stop
(horoplug/rendezvous/elastic/stop_point.py), for which each of them keeps a get of the first key pending:

                                        <-       elastic/update/<generation>/<round>
    elastic/process/<process>/checks    ->
                                        <-       elastic/stop/<generation>/<round>

Nothing else is sent meanwhile, except that a process sets ``elastic/process/<process>/leaving`` if it was told to
leave, ``…/mismatch`` if its state is another one than that of the others, and ``…/pace`` every few seconds. All values
are JSON.

The launcher decides (horoplug/runner/elastic/roster.py)."""

from __future__ import annotations

import dataclasses
import json
from typing import Final, NamedTuple

from horoplug.base.errors import ProtocolError
from horoplug.base.host_updates import HostUpdateResult

FROM_PROCESSES: Final = "elastic/process/"
"""The beginning of the keys that processes set for the launcher."""


class Membership(NamedTuple):
    """The processes that form the job, by rank.

    ``must_sync``: whether all of them must synchronise their state before they train. If not, all have the state with
    which the members of the membership before have stopped at the same check."""

    generation: int
    processes: tuple[int, ...]
    must_sync: bool


class HostUpdate(NamedTuple):
    """Hosts have changed at ``timestamp`` (seconds). ``ends``: the job has to end."""

    timestamp: float
    change: HostUpdateResult
    ends: bool = False


@dataclasses.dataclass(frozen=True)
class Ready:
    """A process is ready for the next membership.

    ``attempt``: how often it has been ready, from 1; ``version``: of its horoplug; ``commits``: how often its program
    has committed a state since the answer before; ``kept``: whether it has stopped at the check at which all members
    of its last membership were to stop, and has kept the state that it had there; ``has_state``: whether its program
    has had the state of the training, which new processes receive."""

    process: int
    attempt: int
    version: str
    commits: int
    kept: bool = False
    has_state: bool = False


@dataclasses.dataclass(frozen=True)
class Leaving:
    """A process was told to leave, for example because its host is about to be taken away."""

    process: int


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A process has another state than rank 0, and ends. ``reason``: how they differ, in one line."""

    process: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Checks:
    """A process of a generation has made so many checks when it learned of the update of a round."""

    process: int
    generation: int
    round: int
    checks: int


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds since a process of a generation has connected, and those of them in which it had operations in flight."""

    process: int
    generation: int
    elapsed: float
    active: float


Message = Ready | Leaving | Mismatch | Checks | Pace
_KINDS: Final = {kind.__name__: kind for kind in (Ready, Leaving, Mismatch, Checks, Pace)}


def pack_message(message: Message) -> bytes:
    """The value that a process sets for the launcher."""
    return json.dumps([type(message).__name__, dataclasses.asdict(message)]).encode()


def unpack_message(value: bytes) -> Message:
    """Read what a process has set. Errors: ProtocolError."""
    try:
        name, fields = json.loads(value)
        kind = _KINDS[name]
        message: Message = kind(**fields)
        for field in dataclasses.fields(kind):
            if type(fields[field.name]).__name__ != field.type:
                raise TypeError
        return message
    except (ValueError, KeyError, TypeError):
        raise ProtocolError("a process has sent the launcher something unreadable") from None


def answer_key(process: int, attempt: int) -> str:
    """The key of the answer to a process."""
    return f"elastic/answer/{process}/{attempt}"


def message_key(message: Message) -> str:
    """The key of a process's message."""
    return f"{FROM_PROCESSES}{message.process}/{type(message).__name__.lower()}"


def update_key(generation: int, round_number: int) -> str:
    """The key that tells a membership that processes should come or go."""
    return f"elastic/update/{generation}/{round_number}"


def stop_key(generation: int, round_number: int) -> str:
    """The key that tells a membership at which check its members stop."""
    return f"elastic/stop/{generation}/{round_number}"


def pack_membership(membership: Membership) -> bytes:
    """The answer to a member."""
    return json.dumps(membership._asdict()).encode()


def pack_dismissal(reason: str, *, is_error: bool) -> bytes:
    """The answer to a process that does not take part any more. ``is_error``: whether its program should fail."""
    return json.dumps({"error" if is_error else "leave": reason}).encode()


def pack_update(update: HostUpdate) -> bytes:
    """The value of :func:`update_key`."""
    return json.dumps(
        {"timestamp": update.timestamp, "change": int(update.change), "ends": update.ends}
    ).encode()


def unpack_update(value: bytes) -> HostUpdate:
    """Read the value of :func:`update_key`."""
    fields = json.loads(value)
    return HostUpdate(fields["timestamp"], HostUpdateResult(fields["change"]), fields["ends"])
