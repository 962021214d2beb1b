"""The start of a job on several hosts: servers on the launcher's addresses, a probe on every host, and the decision.

Ends in one server, on an address that all hosts reach; the others are closed."""

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

from . import agent
from .agent_connection import AgentConnection
from .hosts import Placement
from .preflight import Message, Preflight, StartError, question

_CONNECT_SECONDS = 5.0  # for a connection of a probe, if there is that much time


def candidates(hosts: Sequence[Placement], names: Sequence[str]) -> list[str]:
    """Addresses of this host at which others may reach it, the most likely first. ``names``: of the interfaces that are
    to be used, if any.

    Errors: StartError if there are none of that name, unless no rank runs here."""
    known = interfaces()
    if names:
        try:
            return [interface.address for interface in select_interfaces(names, known)]
        except ValueError as error:
            if any(host.is_local for host in hosts):
                raise StartError(f"--network-interface: {error}") from None
    others = [host for host in hosts if not host.is_local]
    routes = {_route(address) for host in others for address in host.addresses}
    found = sorted(known, key=lambda interface: interface.address not in routes)
    # Loopback is for a machine without a network, on which all hosts are.
    return [one.address for one in found if not one.is_loopback] or [one.address for one in found]


def _route(address: str) -> str | None:
    """This host's address on the way to another one; None if there is no way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))  # sends nothing
        return str(sock.getsockname()[0])
    return None


class Start:
    """What happens before ranks begin."""

    def __init__(
        self,
        links: Sequence[AgentConnection],
        secret: bytes,
        names: Sequence[str],
        began: float,
        seconds: float,
    ) -> None:
        """``names``: of network interfaces, if they are prescribed; ``seconds``: from ``began`` until all must be well.

        Errors: StartError."""
        self._links = links
        self._names = names
        self._seconds = seconds
        self._secret = secret
        self._deadline = began + seconds
        self._inboxes = {link: bytearray() for link in links}
        self._complaints = dict.fromkeys(links, b"")
        self._servers: list[StoreServer] = []
        for address in candidates([link.host for link in links], names):
            with contextlib.suppress(
                OSError
            ):  # one that is not there any more, or is not ready yet
                self._servers.append(StoreServer(secret, address))
        self._preflight = Preflight(
            [link.host.name for link in links],
            [server.address for server in self._servers],
            horoplug.__version__,
        )

    def question(self) -> bytes:
        """What each probe is asked first."""
        addresses = [server.address for server in self._servers]
        patience = min(_CONNECT_SECONDS, self._seconds / 3)
        return question(self._secret, addresses, self._names, patience)

    def feed(self, link: AgentConnection, kind: bytes, payload: bytes) -> None:
        """Take a frame about a host's probe. Errors: StartError."""
        name = link.host.name
        if kind == agent.STDERR:
            self._complaints[link] += payload
        elif kind == b"E":
            raise StartError(f"host {name}: {payload.decode(errors='replace')}")
        elif kind == b"X":
            raise StartError(f"host {name}: {self._why(link, *struct.unpack('!i', payload))}")
        elif kind == agent.STDOUT:
            inbox = self._inboxes[link]
            inbox += payload
            *lines, rest = bytes(inbox).split(b"\n")
            inbox[:] = rest
            for line in lines:
                with contextlib.suppress(ValueError):  # something else that was printed there
                    message = json.loads(line)
                    number = self._links.index(link)
                    self._pass_on(self._preflight.feed(number, message, time.monotonic()))

    def _why(self, link: AgentConnection, code: int) -> str:
        """Why a probe has ended."""
        lines = self._complaints[link].decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"it ended with code {code}"
        if "No module named 'horoplug'" in last:
            return f"horoplug is not installed for the Python there ({last})"
        if "No module named horoplug." in last or "No module named 'horoplug." in last:
            return f"horoplug is older there than on this host ({last})"
        return f"horoplug does not work there: {last}"

    def turn(self) -> None:
        """Look at the clock. Errors: StartError."""
        now = time.monotonic()
        self._pass_on(self._preflight.turn(now))
        if now > self._deadline:
            raise StartError(f"{self._preflight.waiting_for()} within {self._seconds:g} s")

    def _pass_on(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._links[message.host].send(b"M", message.line)

    @property
    def due(self) -> float:
        """When :meth:`turn` is to be called again."""
        return min(self._deadline, self._preflight.due or self._deadline) + 0.01

    @property
    def done(self) -> bool:
        """Whether ranks may begin."""
        return self._preflight.done

    def interface(self, link: AgentConnection) -> str | None:
        """The interface that was prescribed, by its name on a host."""
        return self._preflight.interface(self._links.index(link))

    def server(self) -> StoreServer:
        """The one that all hosts reach, now the caller's."""
        assert self._preflight.server is not None
        server = self._servers.pop(self._preflight.server)
        self.close()
        return server

    def close(self) -> None:
        """Stop serving. Idempotent."""
        for server in self._servers:
            server.close()
        self._servers.clear()
