"""The launcher's addresses, and a rendezvous server on each of them until one is chosen."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from horoplug.rendezvous.network.interfaces import interfaces, select_interfaces
from horoplug.rendezvous.store.server import StoreServer
from horoplug.runner.hosts.hosts import Placement
from horoplug.runner.terms import Terms

from .preflight import StartError


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
