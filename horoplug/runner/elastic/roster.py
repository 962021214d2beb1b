"""Decides which processes an elastic job has, and which of them form the job. No I/O and no clock.

A process is *starting* until it is ready for the first time, *waiting* while it is ready and no member, and a *member*
while it takes part in the current membership (horoplug/rendezvous/elastic/messages.py). A membership is over as soon as
one of its members fails or is ready for the next one. The next one has, in this order, the members of the one before
that are left, and the processes that wait. Survivors therefore keep their order, and rank 0 always is a survivor, which
has the state of the training. (Survivors that a failure has kept from receiving it follow those that have it.)

The caller passes the time (``time.monotonic()``) with each event, and carries out the actions that
:meth:`Roster.advance` returns."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from horoplug.base import config
from horoplug.base.host_updates import HostUpdateResult
from horoplug.rendezvous.elastic.messages import Membership, Ready
from horoplug.runner.ending.finish import Finish, Why, count
from horoplug.runner.terms import Terms

from .discovery import HostManager

STARTS_PER_HOST: Final = 3
"""A host is excluded after this number of processes in a row that have failed before they took part."""
ENDED_ON_NOTICE: Final = os.EX_TEMPFAIL
"""The exit code of a job that has ended because it was told to, before its program was done: 75."""
LOSSES_WITHOUT_PROGRESS: Final = 3
"""The job ends after this number of memberships in a row that all members have left without having got on."""
FAILURES_WITHOUT_PROGRESS: Final = 10
"""The job ends after this number of failed memberships in a row that have not got on."""
_OF_PYTHON = Terms()
_REACTION_SECONDS = 5.0  # for a process to restore its state after it has learned of a failure
PROGRESS_SECONDS: Final = 60.0
"""A membership that lasts that long has got on, as has one in which a program has committed a state."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the user has asked for.

    ``minimum`` and ``maximum``: number of processes; ``wait``: seconds that the job waits for the smallest number;
    ``resets``: how often the job may be formed again, None: any number; ``gather``: seconds that members have after a
    failure until they count as stopped; ``start``: seconds that processes of the first membership wait for late ones;
    ``hosts_may_come``: whether hosts may appear later."""

    minimum: int
    maximum: int
    wait: float = 600.0
    resets: int | None = None
    gather: float = 30.0
    start: float = 30.0
    hosts_may_come: bool = False


def make_limits(
    minimum: int,
    maximum: int,
    *,
    wait: float | None = None,
    resets: int | None = None,
    hosts_may_come: bool = False,
    terms: Terms = _OF_PYTHON,
    environment: Mapping[str, str] = os.environ,
) -> Limits:
    """The limits of a job with the time limits of the configuration. ``wait``: seconds that the job waits for the
    smallest number of processes, None: HOROVOD_ELASTIC_TIMEOUT; ``environment``: the variables that have the
    configuration; ``terms``: for messages. The other arguments are those of :class:`Limits`.

    Errors: ValueError for an invalid variable or a wrong number."""
    if minimum < 1:
        raise ValueError(f"{terms.minimum}={minimum}: at least 1 is wanted")
    if minimum > maximum:
        raise ValueError(f"{terms.minimum} {minimum} is more than {terms.maximum} {maximum}")
    return Limits(
        minimum,
        maximum,
        wait=config.value("ELASTIC_TIMEOUT", environment) if wait is None else wait,
        resets=resets,
        gather=config.value("GLOO_TIMEOUT_SECONDS", environment) + _REACTION_SECONDS,
        start=config.value("START_TIMEOUT", environment),
        hosts_may_come=hosts_may_come,
    )


# ---- actions ---------------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """Start a process on a host. ``slot`` is unique among the live processes, ``local_slot`` among those of its host;
    ``restarts``: how often the job has been formed again after failures."""

    process: int
    host: str
    slot: int
    local_slot: int
    restarts: int


class Form(NamedTuple):
    """Tell the members, each with the attempt that is answered, that they form a membership."""

    membership: Membership
    attempts: tuple[int, ...]


class Dismiss(NamedTuple):
    """Tell a process that it does not take part any more."""

    process: int
    attempt: int
    reason: str
    is_error: bool


class Notify(NamedTuple):
    """Tell a membership that processes should come or go. ``ends``: that all should end."""

    generation: int
    change: HostUpdateResult
    ends: bool = False


class Kill(NamedTuple):
    """Kill a process."""

    process: int


class Say(NamedTuple):
    """Print a line."""

    text: str


Action = Start | Form | Dismiss | Notify | Kill | Say | Finish


# ---- the state -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Process:
    number: int
    host: str
    slot: int
    local_slot: int
    joined: bool = False  # whether it has been a member
    attempt: int = 0  # 0: starting
    waiting: bool = False
    kept: bool = False  # it has the state with which its last membership has stopped
    has_state: bool = False  # it has had the state of the training
    mismatched: bool = False  # its state is another one, and it ends
    leaving: bool = False  # it was told to leave, and does so at the next commit
    dismissed: bool = False  # its end is no event
    killed_at: float | None = None  # when it is killed if it has not ended by itself


class Roster:
    """The processes of one elastic job."""

    def __init__(self, hosts: HostManager, limits: Limits, version: str) -> None:
        """``hosts``: the hosts that may be used; ``version``: of this horoplug, which all processes need."""
        self._hosts = hosts
        self._limits = limits
        self._version = version
        self._live: dict[int, _Process] = {}
        self._next_process = 0
        self._generation = 0
        self._members: tuple[int, ...] = ()
        self._formed_at = 0.0
        self._restarts = 0
        self._resets = 0
        self._notified = False
        self._progress = False  # of the current membership, or since it has ended
        self._has_failed = False  # the current membership
        self._failures = 0  # memberships in a row without progress
        self._losses = 0
        self._gather_until: float | None = None  # set once the current membership is over
        self._start_until = -math.inf
        self._short_since: float | None = None
        self._starts_failed: dict[str, int] = {}
        self._blamed = Finish()  # the first failure of the current membership, if it has a code
        self._finishing = False  # a process has ended its program
        self._noticed = False  # the job was told to end
        self._end: Finish | None = None
        self._over = False
        self._said: list[Action] = []

    @property
    def is_over(self) -> bool:
        """Whether :class:`Finish` was returned."""
        return self._over

    @property
    def members(self) -> tuple[int, ...]:
        """The processes of the current membership, by rank."""
        return self._members

    def describe_member(self, number: int) -> str | None:
        """A member that works: its number, rank and host. None: the process is none any more."""
        process = self._live.get(number)
        if process is None or process.dismissed or number not in self._members:
            return None
        return self._describe(process)

    def processes_on(self, host: str) -> list[int]:
        """The live processes on a host."""
        return [process.number for process in self._live.values() if process.host == host]

    # ---- events ------------------------------------------------------------------------------------------------------

    def ready(self, ready: Ready, now: float) -> None:
        """A process is ready for the next membership."""
        process = self._live.get(ready.process)
        if process is None or process.dismissed or ready.attempt <= process.attempt:
            return  # it has ended, or the message has come late or again
        process.attempt, process.kept, process.has_state = (
            ready.attempt,
            ready.kept,
            ready.has_state,
        )
        if ready.version != self._version:
            reason = (
                f"host {process.host} has horoplug {ready.version}, and the launcher {self._version}: all hosts need "
                "the same version"
            )
            self._said.append(Say(reason))
            self._said.append(self._dismissal(process, reason, is_error=True, now=now))
            self._exclude(process.host)
            return
        process.waiting = True
        self._progress |= ready.commits > 0
        if process.number in self._members:
            self._end_membership(now)

    def mismatch(self, number: int, reason: str) -> None:
        """A process ends because its state is another one than that of the others."""
        process = self._live.get(number)
        if process is not None and not process.dismissed and not process.mismatched:
            process.mismatched = True
            self._said.append(Say(f"{self._describe(process)}: {reason}"))
            self._exclude(process.host)

    def leaving(self, number: int) -> None:
        """A process was told to leave. Its host is about to be taken away, so that it gets no new processes."""
        process = self._live.get(number)
        if process is None or process.leaving or process.dismissed:
            return
        process.leaving = True
        self._said.append(Say(f"{self._describe(process)} was told to leave"))
        self._exclude(process.host)

    def replace(self, number: int, why: str) -> bool:
        """Let another process take the place of one that works, if there is a free slot on another host. The host gets
        no new processes. Returns whether there is such a slot."""
        process = self._live.get(number)
        if process is None or process.leaving or process.dismissed:
            return False
        hosts = self._hosts.current_hosts
        used = [each.host for each in self._live.values()]
        if not any(
            host != process.host and used.count(host) < hosts.get_slots(host)
            for host in hosts.host_assignment_order
        ):
            return False
        process.leaving = True
        self._said.append(Say(f"{self._describe(process)} is replaced: {why}"))
        self._exclude(process.host)
        return True

    def notice(self) -> None:
        """The job was told to end, at the next commit."""
        if not self._noticed:
            self._noticed = True
            self._said.append(Say("the job was told to end"))

    def ended(self, number: int, code: int, text: str, now: float) -> None:
        """A process has ended. ``code``: negative for a signal; ``text``: how it has ended."""
        process = self._live.pop(number, None)
        if process is None or process.dismissed:
            return
        if code == 0:
            self._finishing = True
            return
        self._fail(process, f"{self._describe(process)} {text}", code, now, number)
        if not process.joined:
            failed = self._starts_failed.get(process.host, 0) + 1
            self._starts_failed[process.host] = failed
            if failed >= STARTS_PER_HOST:
                self._exclude(process.host)

    def host_lost(self, host: str, text: str, now: float) -> None:
        """A host is lost, with its processes. ``text``: why, in one line."""
        lost = [self._live.pop(number) for number in self.processes_on(host)]
        counted = [process for process in lost if not process.dismissed]
        members = [process for process in counted if process.number in self._members]
        # Without slots, its processes were about to leave.
        is_new = bool(self._hosts.current_hosts.get_slots(host)) and self._exclude(
            host, silently=True
        )
        note = "; it gets no new processes for now" if is_new else ""
        lost_one = next(iter([*members, *counted]), None)
        self._fail(lost_one, f"host {host}: {text}", 1, now, None, note)

    def _fail(
        self,
        process: _Process | None,
        text: str,
        code: int,
        now: float,
        number: int | None,
        note: str = "",
    ) -> None:
        """``number``: the process that is to blame; None: its host is."""
        self._said.append(Say(text + note))
        if not self._blamed.code:
            code = code if code > 0 else 128 - code
            self._blamed = Finish(code, cause=text, process=number)
        if process is not None and process.number in self._members:
            self._has_failed = True
            self._end_membership(now)

    def _end_membership(self, now: float) -> None:
        if self._gather_until is None:
            self._gather_until = now + self._limits.gather

    def _exclude(self, host: str, *, silently: bool = False) -> bool:
        """Start no processes on a host for a while. Returns whether it was not excluded already."""
        self._starts_failed.pop(host, None)
        if self._hosts.is_blacklisted(host):
            return False
        self._hosts.blacklist(host)
        if not silently:
            self._said.append(Say(f"host {host} gets no new processes for now"))
        return True

    def _describe(self, process: _Process) -> str:
        members, number = self._members, process.number
        rank = f" (rank {members.index(number)})" if number in members else ""
        return f"process {number}{rank} on {process.host}"

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Action]:
        """What is to be done now."""
        if self._over:
            return []
        actions: list[Action] = list(self._kill_late(now))
        actions += self._release(now)
        actions += self._regroup(now)
        if not self._finishing and self._end is None:
            actions += self._start(now)
            actions += self._notify()
            self._check_minimum(now)
        actions = self._said + actions
        self._said = []
        if self._end is None and (self._finishing or self._noticed) and not self._live:
            if self._has_failed:
                self._end = self._blamed
            elif self._noticed:
                self._end = Finish(ENDED_ON_NOTICE, Why.NOTICED)
            else:
                self._end = Finish()
        if self._end is not None:
            self._over = True
            actions.append(self._end)
        return actions

    def due(self, now: float) -> float | None:
        """When :meth:`advance` next has something to do although nothing has happened; None: never."""
        times = [self._gather_until]
        if self._short_since is not None:
            times.append(self._short_since + self._limits.wait)
        times.append(self._hosts.next_return)
        if not self._members or self._gather_until is not None:
            times.append(self._start_until)
        times += [process.killed_at for process in self._live.values()]
        known = [time for time in times if time is not None and time > now]
        return min(known) if known else None

    def _kill_late(self, now: float) -> Iterator[Action]:
        """Kill processes that were dismissed and have not ended."""
        for process in self._live.values():
            if process.killed_at is not None and now >= process.killed_at:
                process.killed_at = None
                yield Kill(process.number)

    def _release(self, now: float) -> Iterator[Action]:
        """Let processes end that wait and are not needed: their slots are gone, or slots that were gone are back."""
        if all(not p.waiting or p.number in self._members for p in self._live.values()):
            return
        staying = self._staying()
        surplus = len(staying) - self._limits.maximum
        for process in sorted(self._live.values(), key=lambda process: -process.number):
            if not process.waiting or process.number in self._members:
                continue
            if process.number not in staying:
                yield self._dismissal(process, "its slot is gone", is_error=False, now=now)
            elif surplus > 0:
                surplus -= 1
                yield self._dismissal(
                    process, "there are enough processes", is_error=False, now=now
                )

    @property
    def _minimum(self) -> int:
        """The smallest number of processes of a membership. To end, any that are left are enough."""
        return 1 if self._noticed else self._limits.minimum

    def _regroup(self, now: float) -> Iterator[Action]:
        """Form the next membership, if the current one is over and the processes are there."""
        waiting = [process for process in self._live.values() if process.waiting]
        if self._finishing:
            for process in waiting:
                is_member = process.number in self._members
                reason = "another process has ended its program"
                yield self._dismissal(process, reason, is_error=is_member, now=now)
            for process in self._live.values():
                # It would only be dismissed. Without a membership, the program may be one that forms none.
                if self._members and not process.attempt and not process.dismissed:
                    process.dismissed = True
                    yield Kill(process.number)
            return
        if self._members and self._gather_until is None:
            return  # the job runs
        present = [self._live[number] for number in self._members if number in self._live]
        survivors = [process for process in present if not process.dismissed]
        late = [process for process in survivors if not process.waiting]
        if late and self._gather_until is not None:
            if now < self._gather_until:
                return
            for process in late:
                seconds = f"{self._limits.gather:g} s"
                self._said.append(
                    Say(f"{self._describe(process)} has not reacted to a failure for {seconds}")
                )
                process.dismissed = True
                yield Kill(process.number)
        survivors = [process for process in survivors if process.waiting]
        survivors.sort(key=lambda process: not process.has_state)
        staying = self._staying()
        stay = [process for process in survivors if process.number in staying]
        if not survivors and not waiting:
            return  # all members have failed; their replacements are not ready yet
        starting = [p for p in self._live.values() if not p.waiting and not p.dismissed]
        if not survivors and starting and now < self._start_until:
            return  # no process has a state with which the job could go on meanwhile
        new = sorted(
            (process for process in waiting if process.number not in self._members),
            key=lambda process: process.number,
        )
        chosen = (stay + new)[: self._limits.maximum]
        # Processes whose slots are gone stay as long as others need them: for their number, or for their state.
        is_state_there = bool(stay) and stay[0].has_state >= survivors[0].has_state
        needed = max(self._minimum - len(chosen), 0 if is_state_there else 1)
        leaving = [process for process in survivors if process.number not in staying][:needed]
        if leaving:
            chosen = [p for p in survivors if p in stay or p in leaving] + chosen[len(stay) :]
        if len(chosen) < self._minimum:
            return
        yield from self._form(chosen, survivors, now)

    def _form(
        self, chosen: list[_Process], survivors: list[_Process], now: float
    ) -> Iterator[Action]:
        if self._members:
            self._resets += 1
            self._count_failures(now, is_loss=not survivors)
            if self._limits.resets is not None and self._resets > self._limits.resets:
                self._fail_job(Why.RESETS, count(self._limits.resets, "time", "times"))
            if self._end is not None:
                return
            # The store may still wait for the update of the last membership.
            yield Notify(self._generation, HostUpdateResult.no_update)
        self._generation += 1
        must_sync = not all(process.kept and process.number in self._members for process in chosen)
        self._members = tuple(process.number for process in chosen)
        for process in survivors:
            if process.number not in self._members:
                yield self._dismissal(process, "its slot is gone", is_error=False, now=now)
        self._formed_at, self._gather_until, self._short_since = now, None, None
        self._notified = self._progress = self._has_failed = False
        self._blamed = Finish()
        for process in chosen:
            process.joined, process.waiting = True, False
            self._starts_failed.pop(process.host, None)
        if self._generation > 1:
            hosts = len({process.host for process in chosen})
            processes = count(len(chosen), "process", "processes")
            self._said.append(
                Say(f"the job goes on with {processes} on {count(hosts, 'host', 'hosts')}")
            )
        attempts = tuple(process.attempt for process in chosen)
        yield Form(Membership(self._generation, self._members, must_sync), attempts)

    def _count_failures(self, now: float, *, is_loss: bool) -> None:
        """Count memberships that have ended without progress, and end the job if there are too many in a row."""
        if self._notified and not self._has_failed:
            return  # it has ended because processes should come or go
        if self._has_failed:
            self._restarts += 1
        if self._progress or now - self._formed_at >= PROGRESS_SECONDS:
            self._failures = self._losses = 0
            return
        self._failures += 1
        self._losses = self._losses + 1 if is_loss else 0
        if self._losses >= LOSSES_WITHOUT_PROGRESS:
            self._fail_job(Why.LOSSES, f"{self._losses} times")
        elif self._failures >= FAILURES_WITHOUT_PROGRESS:
            self._fail_job(Why.NO_PROGRESS, f"{self._failures} times")

    def _staying(self) -> set[int]:
        """The processes that have a slot on a host that the job may use. If a host has lost slots, its members keep
        theirs first. A host that is excluded after failures keeps the processes that it has."""
        hosts, members = self._hosts.current_hosts, set(self._members)
        by_host: dict[str, list[_Process]] = {}
        for process in self._live.values():
            if not process.dismissed and not process.leaving:
                by_host.setdefault(process.host, []).append(process)
        found: set[int] = set()
        for host, processes in by_host.items():
            processes.sort(key=lambda process: (process.number not in members, process.local_slot))
            found.update(process.number for process in processes[: hosts.get_slots(host)])
        return found

    def _start(self, now: float) -> Iterator[Action]:
        """Start processes in free slots, first on hosts on which fewer have failed before they took part."""
        missing = self._limits.maximum - len(self._staying())
        if missing <= 0 or self._noticed:
            return
        hosts = self._hosts.current_hosts
        slots = {process.slot for process in self._live.values()}
        used: dict[str, set[int]] = {host: set() for host in hosts.host_assignment_order}
        for process in self._live.values():
            used.setdefault(process.host, set()).add(process.local_slot)
        order = sorted(
            hosts.host_assignment_order, key=lambda host: self._starts_failed.get(host, 0)
        )
        for host in order:
            while missing > 0 and len(used[host]) < hosts.get_slots(host):
                missing -= 1
                process = _Process(
                    self._next_process, host, _first_not_in(slots), _first_not_in(used[host])
                )
                slots.add(process.slot)
                used[host].add(process.local_slot)
                self._next_process += 1
                self._live[process.number] = process
                self._start_until = now + self._limits.start
                restarts = self._restarts + self._has_failed
                yield Start(process.number, host, process.slot, process.local_slot, restarts)

    def _notify(self) -> Iterator[Action]:
        """Tell the members that processes wait, or that hosts of members are gone."""
        if not self._members or self._gather_until is not None or self._notified:
            return
        if self._noticed:
            self._notified = True
            yield Notify(self._generation, HostUpdateResult.no_update, ends=True)
            return
        change = HostUpdateResult.no_update
        members = [number for number in self._members if number in self._live]
        staying = len(self._staying().intersection(members))
        if len(members) > min(staying, self._limits.maximum) >= self._limits.minimum:
            change |= HostUpdateResult.removed
        new = [p for p in self._live.values() if p.waiting and p.number not in self._members]
        if new and staying < self._limits.maximum:
            change |= HostUpdateResult.added
        if change:
            self._notified = True
            yield Notify(self._generation, change)

    def _check_minimum(self, now: float) -> None:
        """End the job if it cannot have, or has not had for too long, the smallest number of processes."""
        forms = bool(self._members) and self._gather_until is None
        if forms:
            return
        if self._short_since is None:
            self._short_since = now
        minimum = self._minimum
        processes = count(minimum, "process", "processes")
        # Processes that were dismissed still have slots, in which others start when they have ended.
        if (
            len(self._live) < minimum
            and not self._limits.hosts_may_come
            and self._hosts.next_return is None
        ):
            self._fail_job(Why.TOO_FEW_LEFT, processes)
        elif now >= self._short_since + self._limits.wait:
            self._fail_job(Why.TOO_FEW_READY, processes, self._limits.wait)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _fail_job(self, why: Why, count: str, seconds: float = 0.0) -> None:
        first = self._blamed
        self._end = dataclasses.replace(
            first, code=first.code or 1, why=why, count=count, seconds=seconds
        )

    def _dismissal(self, process: _Process, reason: str, *, is_error: bool, now: float) -> Dismiss:
        process.waiting = False
        process.dismissed = not is_error or process.number not in self._members
        if process.dismissed:
            process.killed_at = now + self._limits.gather
        return Dismiss(process.number, process.attempt, reason, is_error)


def _first_not_in(numbers: set[int]) -> int:
    return next(number for number in range(len(numbers) + 1) if number not in numbers)
