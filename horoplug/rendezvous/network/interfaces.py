"""The network interfaces of this host and their addresses."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_UP = 0x1


class _Ifaddrs(ctypes.Structure):
    """The beginning of the C library's ``struct ifaddrs``."""


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


class Interface(NamedTuple):
    """An address of a network interface that is up. One interface can have several."""

    name: str
    address: str
    is_loopback: bool


def interfaces() -> list[Interface]:
    """All addresses of this host's interfaces that are up: IPv4 first, then IPv6, loopback last.

    Link-local IPv6 addresses are left out: they are useless without a zone. Errors: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    found = []
    try:
        entry = first
        while entry:
            item = entry.contents
            address = _address(item.address) if item.flags & _UP else None
            if address is not None and not address.is_link_local:
                found.append(Interface(os.fsdecode(item.name), str(address), address.is_loopback))
            entry = item.next
    finally:
        libc.freeifaddrs(first)
    return sorted(found, key=lambda found: (found.is_loopback, ":" in found.address))


def _address(pointer: int | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address in a ``sockaddr``; None if it is neither IPv4 nor IPv6."""
    if pointer is None:
        return None
    family = ctypes.c_ushort.from_address(pointer).value
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return ipaddress.IPv6Address(ctypes.string_at(pointer + 8, 16))
    return None


def select_interfaces(
    names: Sequence[str], among: Iterable[Interface] | None = None
) -> list[Interface]:
    """The addresses of the interfaces with these names, in the order of the names.

    Names that this host does not have are ignored, since hosts may name their interfaces differently. ``among``: the
    interfaces to select from, by default all. Errors: ValueError with a one-line message if none of them exists with an
    address."""
    known = interfaces() if among is None else list(among)
    found = [interface for name in names for interface in known if interface.name == name]
    if not found:
        wanted = " or ".join(names)
        there = ", ".join(sorted({name for _, name in socket.if_nameindex()}))
        raise ValueError(
            f"there is no network interface {wanted} with an address (there are {there})"
        )
    return found


def interface_address(names: str, set_by: str = "HOROVOD_GLOO_IFACE") -> str:
    """The address of a network interface: IPv4 if it has one, else a global IPv6 address.

    ``names``: one name, or several separated by commas, of which the first that this host has counts.
    ``set_by``: for messages, what names it.

    Errors: ValueError with a one-line message if there is no such interface or it has no address."""
    try:
        listed = [name.strip() for name in names.split(",") if name.strip()]
        return select_interfaces(listed)[0].address
    except ValueError as error:
        raise ValueError(f"{set_by}={names!r} is wrong: {error}") from None
