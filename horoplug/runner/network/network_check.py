"""Checks the network between hosts: a rendezvous server on each address of the launcher, and a probe on each host.

The result is one server, on an address that all hosts reach; the other servers are closed."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Sequence

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


class NetworkCheck:
    """Checks the network between the hosts and chooses the rendezvous server before ranks start."""

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
        self._inboxes = {connection: bytearray() for connection in connections}
        self._stderr = dict.fromkeys(connections, b"")
        self._servers: list[StoreServer] = []
        for address in candidates([connection.host for connection in connections], names, terms):
            with contextlib.suppress(OSError):  # the address has just vanished, or is not ready yet
                self._servers.append(StoreServer(secret, address))
        self._preflight = Preflight(
            [connection.host.name for connection in connections],
            [server.address for server in self._servers],
            horoplug.__version__,
            terms,
        )

    def question(self) -> bytes:
        """The first message to each probe."""
        addresses = [server.address for server in self._servers]
        patience = min(_CONNECT_SECONDS, self._seconds / 3)
        return question(self._secret, addresses, self._names, patience)

    def feed(self, connection: AgentConnection, kind: bytes, payload: bytes) -> None:
        """Handle a frame about a host's probe. Errors: StartError."""
        name = connection.host.name
        if kind == agent.STDERR:
            self._stderr[connection] += payload
        elif kind == agent.NOT_STARTED:
            raise StartError(f"host {name}: {payload.decode(errors='replace')}")
        elif kind == agent.ENDED:
            raise StartError(
                f"host {name}: {self._why_ended(connection, *struct.unpack('!i', payload))}"
            )
        elif kind == agent.STDOUT:
            inbox = self._inboxes[connection]
            inbox += payload
            *lines, rest = bytes(inbox).split(b"\n")
            inbox[:] = rest
            for line in lines:
                # A line that is not JSON is not from the probe.
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    number = self._connections.index(connection)
                    self._send(self._preflight.feed(number, message, time.monotonic()))

    def _why_ended(self, connection: AgentConnection, code: int) -> str:
        """Why a probe has ended."""
        lines = self._stderr[connection].decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"it ended with code {code}"
        if "No module named 'horoplug'" in last:
            return f"horoplug is not installed for the Python there ({last})"
        if "No module named horoplug." in last or "No module named 'horoplug." in last:
            return f"horoplug is older there than on this host ({last})"
        return f"horoplug does not work there: {last}"

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
        server = self._servers.pop(self._preflight.server)
        self.close()
        return server

    def close(self) -> None:
        """Stop serving. Idempotent."""
        for server in self._servers:
            server.close()
        self._servers.clear()
