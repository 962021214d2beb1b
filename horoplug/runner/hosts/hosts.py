"""Parses the hosts that users give, and assigns ranks to hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from horoplug.rendezvous.network.interfaces import interfaces
from horoplug.runner.checks import UsageError

from .host_names import HostNames, spelled_alike

_LOOKUP_SECONDS = 3.0
_OWN = object()  # this machine
_SHOWN = 200  # characters of a wrong list of hosts that an error message shows
_SLOTS = re.compile("[0-9]{1,9}")
_EQUALS = re.compile(r"\s*=\s*")
# An IPv6 address in brackets, a name or an IPv4 address; each after an optional "user@". Neither part may look like a
# flag of ssh, and a name has no empty label.
_USER = r"(?:\w[\w.+\\-]*@)?"
_NAME = r"\w(?:[\w+-]|\.(?!\.))*"
_HOST = re.compile(
    rf"(?:(?P<user>{_USER})\[(?P<six>[^]]+)\]|(?P<name>{_USER}{_NAME}))"
    rf"(?::(?P<slots>{_SLOTS.pattern}))?"
)


class Host(NamedTuple):
    """A machine and its slots: the number of processes that it may run."""

    name: str
    slots: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """A host and its ranks, in the order of their local ranks."""

    name: str
    is_local: bool
    """Whether this is the launcher's machine."""
    ranks: tuple[int, ...]
    addresses: tuple[str, ...] = ()
    """The addresses that this machine's resolver knows; ssh may know others."""


def parse_hosts(text: str) -> list[Host]:
    """Parse ``-H``: ``name:slots,name``; one slot by default, IPv6 addresses in brackets. Errors: UsageError."""
    found = []
    for part in text.split(","):
        host = _host(part.strip())
        if host is None:
            raise UsageError(
                lambda t: (
                    f"{t.hosts} wants host:slots,host:slots, for example localhost:4, not {_cut(text)!r}"
                )
            )
        found.append(host)
    return add_up(found)


def parse_hostfile(path: str) -> list[Host]:
    """Parse a ``-hostfile``: a host on each line, with ``slots=N``, ``:N`` or one slot; ``#`` begins a comment.

    As for Open MPI, blanks around ``=`` are allowed, and ``max_slots=N`` is ignored. A byte order mark is skipped.

    Errors: UsageError with a one-line message, which names the file and the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"the hostfile {path} cannot be read: {reason}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        words = _EQUALS.sub("=", line.partition("#")[0]).split()
        if not words:
            continue
        host = _host(words[0])
        for word in words[1:]:
            name, _, count = word.partition("=")
            known = name in ("slots", "max_slots", "max-slots") and _SLOTS.fullmatch(count)
            if host is None or not known or int(count) == 0:
                host = None
                break
            if name == "slots":
                host = Host(host.name, int(count))
        if host is None:
            raise UsageError(
                f"{path}, line {number}: a line like host slots=4 is wanted, not {_cut(line.strip())!r}"
            )
        found.append(host)
    if not found:
        raise UsageError(f"there are no hosts in {path}")
    return add_up(found)


def parse_host(text: str, slots: int = 1) -> Host:
    """Parse ``name`` or ``name:slots``. ``slots``: of a name without a number. Errors: UsageError."""
    host = _host(text, slots)
    if host is None:
        raise UsageError(f"host or host:slots is wanted, not {_cut(text)!r}")
    return host


def _host(text: str, slots: int = 1) -> Host | None:
    match = _HOST.fullmatch(text)
    if match is None or (match["slots"] and int(match["slots"]) == 0):
        return None
    name = match["name"]
    if name is None:
        try:
            ipaddress.IPv6Address(match["six"])
        except ValueError:
            return None
        name = match["user"] + match["six"]
    return Host(name, int(match["slots"] or slots))


def _cut(text: str) -> str:
    """The beginning of a text, for an error message."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def add_up(hosts: Iterable[Host]) -> list[Host]:
    """Merge entries of the same name, at the place of the first one, and add up their slots."""
    return [Host(*each) for each in HostNames(spelled_alike).merge(hosts).items()]


class Machines:
    """Which machine a name means (host_names.py). It decides once for each name, because a lookup may take long."""

    def __init__(self) -> None:
        self._known: dict[str, Hashable] = {}
        self.addresses: dict[str, list[str]] = {}
        """By name, the addresses that :func:`lookup` has found."""

    def __call__(self, names: Iterable[str]) -> dict[str, Hashable]:
        """The machine that each name means."""
        names = list(names)
        new = [name for name in names if name not in self._known]
        self.addresses |= lookup(new)
        for name, spelled in spelled_alike(new).items():
            is_own = is_this_host(name, self.addresses[name])
            self._known[name] = _OWN if is_own else spelled
        return {name: self._known[name] for name in names}

    def is_own(self, name: str) -> bool:
        """Whether a name that was asked for means this machine."""
        return self._known[name] is _OWN


def assign_ranks(hosts: Sequence[Host], size: int) -> list[Placement]:
    """Assign ranks: they fill one host after the other, and hosts without ranks are left out.

    Errors: UsageError if there are more ranks than slots."""
    machines = Machines()
    merged = HostNames(machines).merge(hosts)
    room = sum(merged.values())
    if size > room:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(
            lambda t: (
                f"{t.size} {size} is more than {listed} has: {room} slot{'s' if room > 1 else ''}; "
                f"give fewer, or name more hosts or slots with {t.hosts}"
            )
        )
    placed, first = [], 0
    for name, slots in merged.items():
        ranks = tuple(range(first, min(first + slots, size)))
        if ranks:
            addresses = tuple(machines.addresses[name])
            placed.append(Placement(name, machines.is_own(name), ranks, addresses))
            first = ranks[-1] + 1
    return placed


def local_and_cross_ranks(placements: Sequence[Placement]) -> dict[int, dict[str, str]]:
    """Each rank's LOCAL_RANK, LOCAL_SIZE, CROSS_RANK and CROSS_SIZE: Horovod's variables without prefix."""
    found = {}
    for host in placements:
        for local, rank in enumerate(host.ranks):
            across = [other for other in placements if len(other.ranks) > local]
            found[rank] = {
                "LOCAL_RANK": str(local),
                "LOCAL_SIZE": str(len(host.ranks)),
                "CROSS_RANK": str(across.index(host)),
                "CROSS_SIZE": str(len(across)),
            }
    return found


def is_this_host(name: str, addresses: Collection[str] | None = None) -> bool:
    """Whether a name or an address means this machine. ``user@host`` never does, because it asks for ssh as that user.

    ``addresses``: the result of :func:`lookup` for the name."""
    own = socket.gethostname()
    known = {"localhost", "localhost.localdomain", "::1", own.lower(), own.lower().split(".")[0]}
    if name.lower() in known or re.fullmatch(r"127(\.\d{1,3}){3}", name):
        return True
    if "@" in name:
        return False
    found = lookup([name])[name] if addresses is None else addresses
    own_addresses = {interface.address for interface in interfaces()}
    return any(one in own_addresses or one.startswith("127.") for one in found)


def lookup(names: Iterable[str], seconds: float = _LOOKUP_SECONDS) -> dict[str, list[str]]:
    """The addresses of hosts, looked up in parallel; a leading ``user@`` is ignored.

    The list is empty for a name that is unknown (ssh may know it from its configuration) or takes longer than
    ``seconds``."""
    found: dict[str, list[str]] = {}

    def ask(name: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            entries = socket.getaddrinfo(name.rpartition("@")[2], None, type=socket.SOCK_STREAM)
            found[name] = [str(entry[4][0]) for entry in entries]

    wanted = list(dict.fromkeys(names))
    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in wanted]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return {name: found.get(name, []) for name in wanted}
