"""Checks several hosts before ranks start: all have the same version of horoplug, all reach one address of the
launcher, and all reach each other.

This is a state machine without I/O and clock: it takes the messages of the hosts' probes (probe.py), and returns
messages to the probes and the chosen address."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
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


class Message(NamedTuple):
    """A line for the probe of one host."""

    host: int
    line: bytes


class Preflight:
    """The exchange of messages with all hosts. :attr:`server` is the index of the chosen address; :attr:`done` is true
    when all checks have passed."""

    def __init__(
        self,
        hosts: Sequence[str],
        candidates: Sequence[tuple[str, int]],
        version: str,
        terms: Terms = COMMAND_LINE,
    ) -> None:
        """``candidates``: addresses at which the launcher listens, best first; ``version``: of the launcher's
        horoplug."""
        self._hosts = [_Host(name, number) for number, name in enumerate(hosts)]
        self._candidates = list(candidates)
        self._version = version
        self._hint = f"{_HINT} {terms.interface}"
        self._common_since: float | None = None
        self.server: int | None = None
        """Index of the chosen candidate, which all hosts reach; None while undecided."""

    @property
    def done(self) -> bool:
        """Whether every host reaches all hosts that its ranks connect to."""
        return self.server is not None and not any(map(self._is_late, self._hosts))

    def interface(self, host: int) -> str | None:
        """The name of the prescribed interface on a host; None if any may be used."""
        return self._hosts[host].interface

    def waiting_for(self) -> str:
        """The hosts that have not answered, for the message at the time limit."""
        silent = [host.name for host in self._hosts if not host.greeted]
        if silent:
            return f"no answer from {', '.join(silent)}"
        return f"no answer from {', '.join(h.name for h in self._hosts if self._is_late(h))}"

    def _is_late(self, host: _Host) -> bool:
        if self.server is None:
            return len(host.reached) + len(host.unreached) < len(self._candidates)
        return host.port is None or host.peers != set(range(host.number))

    # ---- messages ----------------------------------------------------------------------------------------------------

    def feed(self, number: int, message: dict[str, Any], now: float) -> list[Message]:
        """Handle a message of host ``number``'s probe. Returns messages to probes. Errors: StartError."""
        host = self._hosts[number]
        match message:
            case {"hello": hello}:
                self._on_hello(host, hello)
            case {"launcher": {"number": candidate, "own": str(own)}}:
                host.reached[candidate] = own
            case {"launcher": {"number": candidate, "reason": reason}}:
                host.unreached[candidate] = reason
            case {"listening": port}:
                host.port = port
                return self._introduce()
            case {"peer": {"number": peer, "own": str()}}:
                host.peers.add(peer)
            case {"peer": {"number": peer, "reason": reason}}:
                other = self._hosts[peer]
                raise StartError(
                    f"{host.name} does not reach {other.name} at {other.address}: {reason}; {self._hint}"
                )
            case {"failed": reason}:
                raise StartError(f"{host.name} {reason}")
        return self.advance(now)

    def _on_hello(self, host: _Host, hello: dict[str, Any]) -> None:
        host.greeted = True
        if hello["version"] != self._version:
            raise StartError(
                f"{host.name} has horoplug {hello['version']}, and this host {self._version}: "
                "all hosts need the same version"
            )
        if "error" in hello:
            raise StartError(f"{host.name}: {hello['error']}")
        host.interface, host.address = hello.get("interface"), hello.get("address")

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Message]:
        """Choose the launcher's address, if that is possible by now. Errors: StartError if no address works for all
        hosts."""
        if self.server is not None:
            return []
        everyones = range(len(self._candidates))
        common = [c for c in everyones if all(c in host.reached for host in self._hosts)]
        failed = {c for host in self._hosts for c in host.unreached}
        if not common:
            known = all(len(h.reached) + len(h.unreached) == len(everyones) for h in self._hosts)
            if known:
                raise StartError(self._no_network())
            return []
        if self._common_since is None:
            self._common_since = now
        undecided = [c for c in everyones[: common[0]] if c not in failed]
        if undecided and now < self._common_since + PATIENCE:
            return []
        self.server = common[0]
        for host in self._hosts:
            host.address = host.address or host.reached[self.server]
        return [Message(host.number, _line({"listen": host.address})) for host in self._hosts]

    @property
    def due(self) -> float | None:
        """When :meth:`advance` is to be called again, by the caller's clock."""
        if self.server is None and self._common_since is not None:
            return self._common_since + PATIENCE
        return None

    def _introduce(self) -> list[Message]:
        """Once all probes listen, tell each host to connect to the hosts before it, as its ranks will."""
        if any(host.port is None for host in self._hosts):
            return []
        listening = [(host.number, host.address, host.port) for host in self._hosts]
        return [
            Message(host.number, _line({"peers": listening[: host.number]})) for host in self._hosts
        ]

    def _no_network(self) -> str:
        for host in self._hosts:
            if not host.reached:
                tried = ", ".join(
                    f"{self._candidates[c][0]} ({why})" for c, why in sorted(host.unreached.items())
                )
                return f"{host.name} does not reach this host at any of its addresses: {tried}; {self._hint}"
        ways = "; ".join(
            f"{host.name} reaches it at {', '.join(self._candidates[c][0] for c in sorted(host.reached))}"
            for host in self._hosts
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
