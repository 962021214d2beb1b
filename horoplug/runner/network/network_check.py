"""Checks the network between hosts before ranks start there: a rendezvous server on each address of the launcher, and a
probe on each host. The result is one server, on an address that all hosts reach.

A job of a fixed size checks all of its hosts together, and ends if one of them fails. The hosts of an elastic job come
at different times. They are checked in rounds (preflight.py), each of those that have come and those on which the job
runs already. A host that fails is left out. The first round chooses the server. A host that does not answer keeps the
first round waiting for a few seconds, and later ones not at all. Probes run only while a host is checked."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import horoplug
from horoplug.rendezvous.network.interfaces import select_interfaces
from horoplug.rendezvous.store.server import StoreServer
from horoplug.runner.agent import agent
from horoplug.runner.hosts.hosts import Placement
from horoplug.runner.start.connection import AgentConnection
from horoplug.runner.terms import Terms

from .preflight import Elastic, Message, Preflight, StartError, question
from .probe_output import ProbeError, ProbeOutput
from .servers import Servers

_CONNECT_SECONDS: Final = 5.0  # limit for a probe's connection, unless the start timeout is short
_STEPS: Final = 2  # a probe connects and authenticates, each within its limit
_LATER: Final = 1.0  # seconds beyond that for its answer to arrive


@dataclasses.dataclass(eq=False)
class _Host:
    connection: AgentConnection
    number: int
    is_member: bool = False  # the job may run on it
    interface: str | None = None
    problem: str = ""  # why its probe does not work
    probe: ProbeOutput | None = None  # None: it has none
    is_ending: bool = False  # its probe
    candidates: Sequence[int] = ()  # those that its probe was told of
    said: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # before a round
    greeted_at: float = math.inf  # when its agent has answered

    @property
    def is_ready(self) -> bool:
        """Whether its probe has answered."""
        return any("hello" in message for message in self.said)


class NetworkCheck:
    """Checks the hosts of one job."""

    def __init__(
        self,
        hosts: Sequence[Placement],
        secret: bytes,
        names: Sequence[str],
        seconds: float,
        terms: Terms,
        describe: Callable[[Placement], bytes],
        *,
        began: float | None = None,
    ) -> None:
        """``hosts``: those that are known from the beginning; ``names``: the network interfaces to use, empty: any;
        ``seconds``: limit for the probe of a host to answer; ``terms``: those of the caller; ``describe``: the payload
        for an agent that starts the probe of its host; ``began``: when the check of all hosts of a job of a fixed size
        has begun (``time.monotonic()``), which has ``seconds``, too; None: the job is elastic. Errors: StartError."""
        self._servers = Servers(hosts, secret, names, terms)
        self._secret = secret
        self._names = names
        self._seconds = seconds
        self._terms = terms
        self._describe = describe
        self._limit = None if began is None else began + seconds
        self._patience = min(_CONNECT_SECONDS, seconds / 3)
        self._step_seconds = _STEPS * self._patience + _LATER
        self._hosts: dict[AgentConnection, _Host] = {}
        self._next = 0
        self._begin_at = math.inf
        self._round: Preflight | None = None
        self._phase = 0
        self._deadline = math.inf  # of the round's phase
        self._chosen: int | None = None
        self.server: StoreServer | None = None
        """The rendezvous; None until its address is chosen."""

    def add(self, connection: AgentConnection) -> None:
        """A host is to be checked."""
        self._hosts[connection] = _Host(connection, self._next)
        self._next += 1

    def drop(self, connection: AgentConnection) -> None:
        """A host is lost, or has left the job. It may be unknown."""
        host = self._hosts.pop(connection, None)
        if host is not None and self._round is not None:
            self._round.drop(host.number)

    def is_member(self, connection: AgentConnection) -> bool:
        """Whether processes may start on a host."""
        host = self._hosts.get(connection)
        return host is not None and host.is_member

    def interface(self, connection: AgentConnection) -> str | None:
        """The name of the prescribed interface on a host; None if any may be used."""
        return self._hosts[connection].interface

    def close(self) -> None:
        """Stop serving, unless the server was chosen. Idempotent."""
        self._servers.close()

    # ---- probes ------------------------------------------------------------------------------------------------------

    def feed(self, connection: AgentConnection, kind: bytes, payload: bytes) -> None:
        """Handle a frame about a host's probe. :meth:`advance` follows."""
        host = self._hosts.get(connection)
        if host is None or host.probe is None:
            return
        try:
            messages = host.probe.feed(kind, payload)
        except ProbeError as error:
            host.probe = None
            host.said.clear()
            if not host.is_ending:
                host.problem = str(error)
                if self._round is not None:
                    self._round.drop(host.number)
            host.is_ending = False
            return
        for message in [] if host.is_ending else messages:
            self._on_message(host, message)

    def _on_message(self, host: _Host, message: dict[str, Any]) -> None:
        match message:
            case {"launcher": {"number": int(number)}}:
                message["launcher"]["number"] = host.candidates[number]
                host.said.append(message)
            case {"hello": _}:
                host.said.append(message)
        if self._round is not None:
            self._send(self._round.feed(host.number, message, time.monotonic()))

    def _send(self, messages: Sequence[Message]) -> None:
        by_number = {host.number: host.connection for host in self._hosts.values()}
        for message in messages:
            by_number[message.host].send(agent.PROBE_INPUT, message.line)

    def _start_probes(self) -> None:
        addresses = self._servers.addresses
        for host in self._hosts.values():
            if host.probe is not None or host.problem:
                continue
            host.probe = ProbeOutput()
            host.candidates = range(len(addresses)) if self._chosen is None else [self._chosen]
            told = [addresses[number] for number in host.candidates]
            line = question(self._secret, told, self._names, self._patience)
            host.connection.send(agent.PROBE, self._describe(host.connection.host))
            host.connection.send(agent.PROBE_INPUT, line)

    def _end_probe(self, host: _Host) -> None:
        host.problem = ""
        if host.probe is not None and not host.is_ending:
            host.is_ending = True
            host.said.clear()
            host.connection.send(agent.PROBE_INPUT)

    # ---- rounds ------------------------------------------------------------------------------------------------------

    @property
    def _new(self) -> list[_Host]:
        return [host for host in self._hosts.values() if not host.is_member]

    @property
    def due(self) -> float | None:
        """When to call :meth:`advance` again (``time.monotonic()``); None: not without an event."""
        late = [host.greeted_at + self._seconds for host in self._new if not host.is_ready]
        if self._limit is not None:
            late = [self._limit]
        check = self._round
        due = min(self._begin_at if check is None else check.due or self._deadline, *late, math.inf)
        return due + 0.01 if due < math.inf else None

    def advance(self, now: float) -> Iterator[tuple[AgentConnection, str]]:
        """Act on what is due now. Yields hosts that have passed, with no text, and hosts of an elastic job that have
        failed, with the reason in one line that does not begin with their names. Errors: StartError, which ends a job
        of a fixed size."""
        new = self._new
        if not new:
            self._round, self._begin_at = None, math.inf
            for host in self._hosts.values():
                self._end_probe(host)
            return
        if self._limit is not None:
            yield from self._check_all(self._limit, now)
            return
        if all(host.connection.host.is_local for host in self._hosts.values()):
            for host in new:  # nothing is between it and the launcher
                yield from self._admit_local(host)
            return
        self._start_probes()
        for host in new:
            if host.connection.greeted and host.greeted_at == math.inf:
                host.greeted_at = now
            if host.problem or (not host.is_ready and now > host.greeted_at + self._seconds):
                yield self._refuse(host, host.problem or f"no answer within {self._seconds:g} s")
        if self._round is None:
            self._begin_round(now)
        if self._round is not None:
            yield from self._advance_round(self._round, now)

    def _admit_local(self, host: _Host) -> Iterator[tuple[AgentConnection, str]]:
        try:
            host.interface = select_interfaces(self._names)[0].name if self._names else None
        except ValueError as error:
            yield self._refuse(host, str(error))
            return
        host.is_member = True
        self._choose(0)
        yield host.connection, ""

    def _refuse(self, host: _Host, why: str) -> tuple[AgentConnection, str]:
        self.drop(host.connection)
        return host.connection, why

    def _choose(self, number: int) -> None:
        if self._chosen is None:
            self._chosen = number
            self.server = self._servers.take(number)

    def _check_all(self, limit: float, now: float) -> Iterator[tuple[AgentConnection, str]]:
        """Check the hosts of a job of a fixed size, all together."""
        if self._round is None:
            self._start_probes()
            self._round = self._preflight(self._hosts.values())
        for host in self._hosts.values():
            if host.problem:
                raise StartError(f"host {host.connection.host.name}: {host.problem}")
        self._send(self._round.advance(now))
        if now > limit:
            raise StartError(f"{self._round.waiting_for()} within {self._seconds:g} s")
        if self._round.done:
            yield from self._end_round(self._round, self._new)

    def _preflight(self, hosts: Iterable[_Host], elastic: Elastic | None = None) -> Preflight:
        names = {host.number: host.connection.host.name for host in hosts}
        addresses, version = self._servers.addresses, horoplug.__version__
        return Preflight(names, addresses, version, self._terms, elastic)

    def _end_round(
        self, check: Preflight, passed: Sequence[_Host]
    ) -> Iterator[tuple[AgentConnection, str]]:
        assert check.server is not None
        self._choose(check.server)
        self._round = None
        for host in passed:
            host.is_member, host.interface = True, check.interface(host.number)
            yield host.connection, ""

    def _begin_round(self, now: float) -> None:
        """Begin a round, unless it is better to wait for the answer of a host."""
        hosts = self._hosts.values()
        if not any(host.is_ready and not host.is_member for host in hosts):
            self._begin_at = math.inf
            return
        self._begin_at = min(self._begin_at, now + self._patience)
        is_first = self._chosen is None
        awaited = [host for host in hosts if (host.is_member or is_first) and not host.problem]
        if now < self._begin_at and not all(host.is_ready for host in awaited):
            return
        self._begin_at = math.inf
        ready = [host for host in hosts if host.is_ready]
        elastic = Elastic({host.number for host in ready if host.is_member}, self._chosen)
        self._round = self._preflight(ready, elastic)
        self._phase, self._deadline = 0, now + self._step_seconds
        for host in ready:
            for message in host.said:
                self._send(self._round.feed(host.number, message, now))

    def _advance_round(self, check: Preflight, now: float) -> Iterator[tuple[AgentConnection, str]]:
        self._send(check.advance(now))
        if now > self._deadline and check.phase == self._phase:
            check.fail_late(self._step_seconds)
            self._send(check.advance(now))
        if check.phase != self._phase:
            self._phase, self._deadline = check.phase, now + self._step_seconds
        if check.server is not None:
            self._choose(check.server)
        for host in self._new:
            if why := check.failed.get(host.number):
                yield self._refuse(host, why)
        asked = [host for host in self._new if host.number in check.hosts]
        if not asked:
            self._round = None
        elif check.done:
            yield from self._end_round(check, asked)
