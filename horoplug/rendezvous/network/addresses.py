"""By which address other hosts reach this one, and what a host's name means."""

from __future__ import annotations

import ipaddress
import socket

from horoplug.rendezvous.network.interfaces import interfaces
from horoplug.rendezvous.network.topology import interface_address

# Addresses for documentation: nothing is sent there, but their route is the one to other networks.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def own_address(interface: str | None = None) -> str:
    """Where other hosts reach this one: at ``interface``, or where its default route begins, or (in a network that is
    closed) at its first address.

    Errors: ValueError for an interface that is not there, OSError if the addresses cannot be listed."""
    if interface:
        return interface_address(interface)
    for family, address in _ELSEWHERE:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((address, 9))
                return str(sock.getsockname()[0])
            except OSError:
                continue
    # Loopback is the last of them; without any network at all it is the right one.
    return next((each.address for each in interfaces()), "127.0.0.1")


def addresses(name: str) -> list[str]:
    """The addresses of a host, IPv4 first. A name that means the host itself in this process's eyes (127.0.1.1, as
    Debian has it, or localhost) is the address that others have for it. Errors: OSError if it is unknown."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda each: each[0] != socket.AF_INET)
    texts = dict.fromkeys(str(each[4][0]) for each in ordered)
    return list(dict.fromkeys(own_address() if is_loopback(text) else text for text in texts))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
