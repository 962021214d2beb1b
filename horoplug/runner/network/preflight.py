"""Checks several hosts before ranks start: all have the same version of horoplug, all reach one address of the
launcher, and all reach each other.

This is a state machine without I/O and clock: it takes the messages of the hosts' probes (probe.py), and returns
messages to the probes and the chosen address. A job of a fixed size needs all of its hosts. An elastic job leaves out
those that fail."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from horoplug.runner.terms import COMMAND_LINE, Terms

PATIENCE = 1.0  # seconds to wait for a preferred address once another address works
_HINT = "let firewalls pass TCP between the hosts, or choose a network with"


class StartError(Exception):
    """The job cannot start; the text is one line for the user."""


@dataclasses.dataclass(eq=False)
class _Host:
    name: str
    number: int
    greeted: bool = False
    interface: str | None = None  # prescribed by the user; its name on this host
    address: str | None = None  # where its ranks will listen
    # By candidate: the address of this host from which it has reached the candidate, and why it has not.
    reached: dict[int, str] = dataclasses.field(default_factory=dict)
    unreached: dict[int, str] = dataclasses.field(default_factory=dict)
    port: int | None = None
    peers: set[int] = dataclasses.field(default_factory=set)  # hosts that it has reached
    missed: dict[int, str] = dataclasses.field(default_factory=dict)  # why it has not reached hosts

    def has_tried(self, candidates: Collection[int]) -> bool:
        return all(number in self.reached or number in self.unreached for number in candidates)


class Message(NamedTuple):
    """A line for the probe of one host."""

    host: int
    line: bytes


class Elastic(NamedTuple):
    """What differs in an elastic job. Hosts may get ranks in any order, so that each host has to reach all others."""

    members: Collection[int] = ()
    """Hosts on which the job runs already: another host that does not reach one of them, or is not reached by it, is
    the one that fails."""
    server: int | None = None
    """The candidate that the job uses already; None: it is to be chosen."""


class Preflight:
    """The exchange of messages with all hosts. :attr:`server` is the index of the chosen address; :attr:`done` is true
    when all checks have passed."""

    def __init__(
        self,
        hosts: Mapping[int, str],
        candidates: Sequence[tuple[str, int]],
        version: str,
        terms: Terms = COMMAND_LINE,
        elastic: Elastic | None = None,
    ) -> None:
        """``hosts``: their names, by numbers in the order of the ranks; ``candidates``: addresses at which the launcher
        listens, best first; ``version``: of the launcher's horoplug; ``elastic``: hosts that fail are left out, None:
        each failure is a StartError."""
        self._hosts = {number: _Host(name, number) for number, name in hosts.items()}
        self._candidates = list(candidates)
        self._version = version
        self._hint = f"{_HINT} {terms.interface}"
        self._elastic = elastic
        self._options: Sequence[int] = range(len(self._candidates))
        if elastic is not None and elastic.server is not None:
            self._options = [elastic.server]
        self._common_since: float | None = None
        self._introduced = False
        self.server: int | None = None
        """Index of the chosen candidate, which all hosts reach; None while undecided."""
        self.failed: dict[int, str] = {}
        """Why hosts of an elastic job were left out, in one line that does not begin with their names."""

    @property
    def done(self) -> bool:
        """Whether every host reaches all hosts that its ranks connect to."""
        return self.server is not None and not any(map(self._is_late, self._hosts.values()))

    @property
    def phase(self) -> int:
        """Grows as the check gets on. A host that works answers within a time that is counted from the last change."""
        return (self.server is not None) + self._introduced

    @property
    def hosts(self) -> Collection[int]:
        """The hosts that have not failed."""
        return self._hosts.keys()

    def interface(self, host: int) -> str | None:
        """The name of the prescribed interface on a host; None if any may be used."""
        return self._hosts[host].interface

    def waiting_for(self) -> str:
        """The hosts that have not answered, for the message at the time limit."""
        hosts = self._hosts.values()
        silent = [host.name for host in hosts if not host.greeted]
        return f"no answer from {', '.join(silent or [h.name for h in hosts if self._is_late(h)])}"

    def _is_late(self, host: _Host) -> bool:
        if self.server is None:
            return not host.has_tried(self._options)
        return host.port is None or not host.peers >= self._wanted(host)

    def _has_answered(self, host: _Host) -> bool:
        """Whether a host has answered the last message to it."""
        if self.server is None:
            return host.has_tried(self._options)
        if not self._introduced:
            return host.port is not None
        return host.peers | host.missed.keys() >= self._wanted(host)

    def _wanted(self, host: _Host) -> set[int]:
        """The hosts that a host connects to: those before it, as its ranks will; in an elastic job all others, but for
        members those that are new."""
        if self._elastic is None:
            return {number for number in self._hosts if number < host.number}
        members = self._elastic.members
        known = members if host.number in members else ()
        return self._hosts.keys() - {host.number, *known}

    # ---- messages ----------------------------------------------------------------------------------------------------

    def feed(self, number: int, message: dict[str, Any], now: float) -> list[Message]:
        """Handle a message of host ``number``'s probe. Returns messages to probes. Errors: StartError."""
        host = self._hosts.get(number)
        if host is None:
            return []  # it was left out
        match message:
            case {"hello": hello}:
                self._on_hello(host, hello)
            case {"launcher": {"number": candidate, "own": str(own)}}:
                host.reached[candidate] = own
            case {"launcher": {"number": candidate, "reason": reason}}:
                host.unreached[candidate] = reason
            case {"listening": port}:
                host.port = port
            case {"peer": {"number": peer, "own": str()}}:
                host.peers.add(peer)
            case {"peer": {"number": peer, "reason": reason}}:
                host.missed[peer] = reason
                if self._elastic is None:
                    self._fail(host, self._misses(host, self._hosts[peer]))
            case {"failed": reason}:
                self._fail(host, reason)
        return self.advance(now)

    def _on_hello(self, host: _Host, hello: dict[str, Any]) -> None:
        host.greeted = True
        if hello["version"] != self._version:
            reason = f"has horoplug {hello['version']}, and this host {self._version}: all hosts need the same version"
            self._fail(host, reason)
        elif "error" in hello:
            self._fail(host, hello["error"], link=": ")
        host.interface, host.address = hello.get("interface"), hello.get("address")

    def drop(self, number: int) -> None:
        """A host is lost, or has left the job."""
        self._hosts.pop(number, None)

    def _fail(self, host: _Host, reason: str, link: str = " ") -> None:
        """A host cannot be used. ``reason``: why, as it follows the host's name and ``link``."""
        if self._elastic is None:
            raise StartError(f"{host.name}{link}{reason}")
        self.drop(host.number)
        if host.number not in self._elastic.members:
            self.failed[host.number] = reason if link == ": " else f"it {reason}"

    def fail_late(self, seconds: float) -> None:
        """Leave out the hosts of an elastic job that have not answered for ``seconds``."""
        for host in [host for host in self._hosts.values() if not self._has_answered(host)]:
            self._fail(host, f"no answer within {seconds:g} s", link=": ")

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Message]:
        """Do what is due by now. Returns messages to probes. Errors: StartError if no address works for all hosts."""
        messages = list(self._choose(now)) if self.server is None else []
        messages += self._introduce()
        if self._introduced and all(map(self._has_answered, self._hosts.values())):
            self._leave_out()
        return messages

    def _choose(self, now: float) -> Iterator[Message]:
        """Choose the launcher's address, if that is possible by now."""
        if self._elastic is not None:
            for host in list(self._hosts.values()):
                if host.has_tried(self._options) and not host.reached.keys() & self._options:
                    self._fail(host, self._reaches_nothing(host))
        hosts = self._hosts.values()
        if not hosts:
            return
        failed = {c for host in hosts for c in host.unreached}
        common = [c for c in self._options if all(c in host.reached for host in hosts)]
        if not common:
            if not all(host.has_tried(self._options) for host in hosts):
                return
            if self._elastic is None:
                raise StartError(self._no_network())
            common = [self._best()]
        if self._common_since is None:
            self._common_since = now
        undecided = [c for c in self._options[: self._options.index(common[0])] if c not in failed]
        if undecided and now < self._common_since + PATIENCE:
            return
        self.server = common[0]
        for host in hosts:
            host.address = host.address or host.reached[self.server]
            yield Message(host.number, _line({"listen": host.address}))

    def _best(self) -> int:
        """The candidate that most hosts reach. The other hosts fail."""
        hosts = list(self._hosts.values())
        best = max(self._options, key=lambda c: (sum(c in host.reached for host in hosts), -c))
        for host in hosts:
            if best not in host.reached:
                ways, common = self._ways(host), self._candidates[best][0]
                self._fail(
                    host, f"reaches this host at {ways}, and others at {common}; {self._hint}"
                )
        return best

    @property
    def due(self) -> float | None:
        """When :meth:`advance` is to be called again, by the caller's clock."""
        if self.server is None and self._common_since is not None:
            return self._common_since + PATIENCE
        return None

    def _introduce(self) -> Iterator[Message]:
        """Once all probes listen, tell each host to connect to others (:meth:`_wanted`)."""
        hosts = self._hosts.values()
        if self.server is None or self._introduced or any(host.port is None for host in hosts):
            return
        self._introduced = True
        for host in hosts:
            wanted = self._wanted(host)
            peers = [
                (each.number, each.address, each.port) for each in hosts if each.number in wanted
            ]
            yield Message(host.number, _line({"peers": peers}))

    def _leave_out(self) -> None:
        """Leave out the hosts of an elastic job that keep it from having all hosts reach each other: first the one with
        the most failures, of equal ones the last."""
        members = () if self._elastic is None else self._elastic.members
        hosts = self._hosts
        while missed := [(h, hosts[n]) for h in hosts.values() for n in h.missed if n in hosts]:
            involved = [host for pair in missed for host in pair]
            new = (host for host in involved if host.number not in members)
            worst = max(new, key=lambda host: (involved.count(host), host.number), default=None)
            if worst is None:
                return
            one, other = next(pair for pair in missed if worst in pair)
            text = self._misses(one, other)
            self._fail(worst, text if worst is one else f"is not reached: {one.name} {text}")

    # ---- texts -------------------------------------------------------------------------------------------------------

    def _misses(self, host: _Host, other: _Host) -> str:
        reason = host.missed[other.number]
        return f"does not reach {other.name} at {other.address}: {reason}; {self._hint}"

    def _reaches_nothing(self, host: _Host) -> str:
        tried = ", ".join(
            f"{self._candidates[c][0]} ({why})" for c, why in sorted(host.unreached.items())
        )
        return f"does not reach this host at any of its addresses: {tried}; {self._hint}"

    def _ways(self, host: _Host) -> str:
        return ", ".join(self._candidates[c][0] for c in sorted(host.reached))

    def _no_network(self) -> str:
        for host in self._hosts.values():
            if not host.reached:
                return f"{host.name} {self._reaches_nothing(host)}"
        ways = "; ".join(
            f"{host.name} reaches it at {self._ways(host)}" for host in self._hosts.values()
        )
        return f"no address of this host is reached by all others: {ways}; {self._hint}"


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def question(
    secret: bytes, candidates: Sequence[tuple[str, int]], interfaces: Sequence[str], seconds: float
) -> bytes:
    """The first line to every probe. ``seconds``: limit for each connection."""
    return _line(
        {
            "secret": secret.hex(),
            "candidates": list(candidates),
            "interfaces": list(interfaces),
            "seconds": seconds,
        }
    )
