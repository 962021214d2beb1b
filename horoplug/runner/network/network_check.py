"""Checks the network between hosts: a rendezvous server on each address of the launcher, and a probe on each host.

The result is one server, on an address that all hosts reach; the other servers are closed."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import horoplug
from horoplug.rendezvous.network.interfaces import interfaces, select_interfaces
from horoplug.rendezvous.store.server import StoreServer
from horoplug.runner.agent import agent
from horoplug.runner.hosts.hosts import Placement
from horoplug.runner.start.connection import AgentConnection
from horoplug.runner.terms import Terms

from .preflight import Message, Preflight, StartError, question

_CONNECT_SECONDS = 5.0  # limit for a probe's connection, unless the start timeout is short


def candidates(hosts: Sequence[Placement], names: Sequence[str], terms: Terms) -> list[str]:
    """Addresses under which other hosts may reach this one, the most likely first.

    ``names``: the interfaces to use; empty: all. Errors: StartError if this host runs ranks and has none of the
    interfaces."""
    known = interfaces()
    if names:
        try:
            return [interface.address for interface in select_interfaces(names, known)]
        except ValueError as error:
            if any(host.is_local for host in hosts):
                raise StartError(f"{terms.interface}: {error}") from None
    others = [host for host in hosts if not host.is_local]
    routes = {_route(address) for host in others for address in host.addresses}
    found = sorted(known, key=lambda interface: interface.address not in routes)
    # Loopback only serves a machine without a network, which then has all hosts.
    return [one.address for one in found if not one.is_loopback] or [one.address for one in found]


def _route(address: str) -> str | None:
    """This host's source address for packets to another one; None without a route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))  # sends nothing
        return str(sock.getsockname()[0])
    return None


class Servers:
    """A rendezvous server on each address of this host that other hosts may reach, until one is chosen."""

    def __init__(
        self, hosts: Sequence[Placement], secret: bytes, names: Sequence[str], terms: Terms
    ) -> None:
        """The arguments are those of :func:`candidates`. Errors: StartError."""
        self._open: list[StoreServer] = []
        for address in candidates(hosts, names, terms):
            with contextlib.suppress(OSError):  # the address has just vanished, or is not ready yet
                self._open.append(StoreServer(secret, address))
        if not self._open:
            raise StartError("this host has no address that other hosts could reach")
        self.addresses = [server.address for server in self._open]

    def take(self, number: int) -> StoreServer:
        """Hand over the server with this index, and close the others."""
        server = self._open.pop(number)
        self.close()
        return server

    def close(self) -> None:
        """Stop serving. Idempotent."""
        for server in self._open:
            server.close()
        self._open.clear()


class ProbeError(Exception):
    """A probe has ended, or could not be started; the text tells why."""


class ProbeOutput:
    """What the probe of one host sends."""

    def __init__(self) -> None:
        self._inbox = bytearray()
        self._stderr = b""

    def feed(self, kind: bytes, payload: bytes) -> list[dict[str, Any]]:
        """Handle a frame about the probe. Returns the probe's messages. Errors: ProbeError."""
        if kind == agent.STDERR:
            self._stderr += payload
        elif kind == agent.NOT_STARTED:
            raise ProbeError(payload.decode(errors="replace"))
        elif kind == agent.ENDED:
            raise ProbeError(self._why_ended(*struct.unpack("!i", payload)))
        elif kind == agent.STDOUT:
            *lines, rest = (bytes(self._inbox) + payload).split(b"\n")
            self._inbox[:] = rest
            return [message for line in lines for message in _parse(line)]
        return []

    def _why_ended(self, code: int) -> str:
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"it ended with code {code}"
        if "No module named 'horoplug'" in last:
            return f"horoplug is not installed for the Python there ({last})"
        if "No module named horoplug." in last or "No module named 'horoplug." in last:
            return f"horoplug is older there than on this host ({last})"
        return f"horoplug does not work there: {last}"


def _parse(line: bytes) -> list[dict[str, Any]]:
    """The message on a line; none if it is not from the probe."""
    with contextlib.suppress(ValueError):
        message = json.loads(line)
        return [message] if isinstance(message, dict) else []
    return []


def limit(start_seconds: float) -> float:
    """Seconds that a probe has for a connection. ``start_seconds``: those of the whole start."""
    return min(_CONNECT_SECONDS, start_seconds / 3)


class NetworkCheck:
    """Checks the network between the hosts of a job of a fixed size, and chooses the rendezvous server, before ranks
    start."""

    def __init__(
        self,
        connections: Sequence[AgentConnection],
        secret: bytes,
        names: Sequence[str],
        began: float,
        seconds: float,
        terms: Terms,
    ) -> None:
        """``connections``: to the agents; ``names``: the network interfaces to use, empty: any; ``seconds``: limit of
        the checks, counted from ``began`` (``time.monotonic()``); ``terms``: those of the caller.

        Errors: StartError."""
        self._connections = connections
        self._names = names
        self._seconds = seconds
        self._secret = secret
        self._deadline = began + seconds
        self._outputs = {connection: ProbeOutput() for connection in connections}
        self._servers = Servers([each.host for each in connections], secret, names, terms)
        hosts = {number: each.host.name for number, each in enumerate(connections)}
        version = horoplug.__version__
        self._preflight = Preflight(hosts, self._servers.addresses, version, terms)

    def question(self) -> bytes:
        """The first message to each probe."""
        addresses = self._servers.addresses
        return question(self._secret, addresses, self._names, limit(self._seconds))

    def feed(self, connection: AgentConnection, kind: bytes, payload: bytes) -> None:
        """Handle a frame about a host's probe. Errors: StartError."""
        try:
            messages = self._outputs[connection].feed(kind, payload)
        except ProbeError as error:
            raise StartError(f"host {connection.host.name}: {error}") from None
        number = self._connections.index(connection)
        for message in messages:
            self._send(self._preflight.feed(number, message, time.monotonic()))

    def advance(self) -> None:
        """Act on what is due now. Errors: StartError, also when the time limit has passed."""
        now = time.monotonic()
        self._send(self._preflight.advance(now))
        if now > self._deadline:
            raise StartError(f"{self._preflight.waiting_for()} within {self._seconds:g} s")

    def _send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._connections[message.host].send(agent.PROBE_INPUT, message.line)

    @property
    def due(self) -> float:
        """When to call :meth:`advance` again (``time.monotonic()``)."""
        return min(self._deadline, self._preflight.due or self._deadline) + 0.01

    @property
    def done(self) -> bool:
        """Whether ranks may start."""
        return self._preflight.done

    def interface(self, connection: AgentConnection) -> str | None:
        """The name of the prescribed interface on a host; None if any may be used."""
        return self._preflight.interface(self._connections.index(connection))

    def server(self) -> StoreServer:
        """Hand over the server that all hosts reach, and close the others."""
        assert self._preflight.server is not None
        return self._servers.take(self._preflight.server)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._servers.close()
