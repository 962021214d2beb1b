"""Finds the hosts of an elastic job, again and again while it runs, and decides which of them may be used.

``find_available_hosts_and_slots`` of a :class:`HostDiscovery` says which hosts exist now. A :class:`HostManager` keeps
their order, so that ranks stay where they are, and leaves out hosts on which processes have failed."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence

from horoplug.base.host_updates import HostUpdateResult
from horoplug.runner.checks import UsageError
from horoplug.runner.hosts.host_names import HostNames, Identify
from horoplug.runner.hosts.hosts import parse_host

SCRIPT_SECONDS = 30.0
"""Seconds that a discovery script may take, unless said otherwise."""
_MOST_OUTPUT = 1 << 20  # bytes
# Runs a script, and kills the process group if the launcher is killed meanwhile: stdin is a pipe from the launcher,
# which then ends. It stays open while the script runs, and the script itself has an empty stdin.
_WATCHED = """
exec 3<&0 </dev/null
(read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 &
exec 3<&-
/bin/sh -c "$1"
code=$?
kill $!
wait $! 2>/dev/null
exit $code
"""


class DiscoveryError(RuntimeError):
    """The hosts cannot be found now; the text is one line that says why."""


class HostDiscovery(ABC):
    """Says which hosts an elastic job may use now."""

    @property
    def complaints(self) -> list[str]:
        """One line for each thing that was wrong with the hosts that were found last."""
        return []

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The number of slots of each host. Errors: any; the hosts that were found last are kept then."""


class MergedHosts(HostDiscovery):
    """The hosts of another discovery, with one name for each machine (runner/hosts/host_names.py)."""

    def __init__(
        self, discovery: HostDiscovery, identify: Identify, unknown: str = "there is no host {}"
    ) -> None:
        """``unknown``: the complaint about a name that means no machine."""
        self._discovery = discovery
        self._names = HostNames(self._machines)
        self._identify = identify
        self._unknown = unknown
        self._missing: list[str] = []

    @property
    def complaints(self) -> list[str]:
        """One line for each name that means no machine, after those of the other discovery."""
        return [
            *getattr(self._discovery, "complaints", ()),
            *map(self._unknown.format, self._missing),
        ]

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        self._missing = []
        return self._names.merge(self._discovery.find_available_hosts_and_slots().items())

    def _machines(self, names: list[str]) -> Mapping[str, Hashable]:
        found = self._identify(names)
        self._missing = [name for name in names if found[name] is None]
        return found


class FixedHosts(HostDiscovery):
    """Hosts that a program sets."""

    def __init__(self, available_hosts: Mapping[str, int]) -> None:
        self._hosts = dict(available_hosts)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._hosts)

    def set(self, available_hosts: Mapping[str, int]) -> None:
        """Replace the hosts."""
        self._hosts = dict(available_hosts)


class HostDiscoveryScript(HostDiscovery):
    """Hosts that a script prints: a line ``host`` or ``host:slots`` for each."""

    def __init__(
        self, discovery_script: str, slots: int | None = None, *, timeout: float = SCRIPT_SECONDS
    ) -> None:
        """``discovery_script``: a command for the shell. ``slots``: of hosts without a number (default: 1).
        ``timeout``: seconds that the script may take."""
        self._script = discovery_script
        self._slots = 1 if slots is None else slots
        self._timeout = timeout
        self._complaints: list[str] = []

    @property
    def complaints(self) -> list[str]:
        """One line for each wrong line of the last output. The other lines are used."""
        return self._complaints

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the script. Errors: DiscoveryError if it fails, takes too long, or prints no host but wrong lines."""
        hosts, self._complaints = parse_output(self._run(), self._slots)
        if not hosts and self._complaints:
            raise DiscoveryError(f"{self._script}: {self._complaints[0]}")
        return hosts

    def _run(self) -> str:
        with subprocess.Popen(
            ["/bin/sh", "-c", _WATCHED, "sh", self._script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that all of its processes can be ended
        ) as process:
            try:
                output, errors = self._read(process)
            except DiscoveryError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            lines = errors.decode(errors="replace").split("\n")
            reason = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
            raise DiscoveryError(
                f"{self._script} failed with exit code {process.returncode}: {reason}"
            )
        return output.decode(errors="replace")

    def _read(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """What the script prints until it ends. Errors: DiscoveryError if it takes too long or prints too much."""
        deadline = time.monotonic() + self._timeout
        late = DiscoveryError(f"{self._script} did not end within {self._timeout:g} s")
        assert process.stdout
        assert process.stderr
        texts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        with selectors.DefaultSelector() as selector:
            for number in texts:
                selector.register(number, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    raise late
                for key, _ in ready:
                    part = os.read(key.fd, 1 << 16)
                    texts[key.fd] += part
                    if not part:
                        selector.unregister(key.fd)
                    elif len(texts[key.fd]) > _MOST_OUTPUT:
                        raise DiscoveryError(
                            f"{self._script} printed more than {_MOST_OUTPUT} bytes"
                        )
        try:
            process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            raise late from None
        output, errors = texts.values()
        return bytes(output), bytes(errors)


def parse_output(text: str, slots: int = 1) -> tuple[dict[str, int], list[str]]:
    """The hosts that a discovery script has printed, and a line of complaint for each line that is ignored.

    ``slots``: of hosts without a number. A host with ``:0`` is known, but has no slot at present; it is left out."""
    hosts: dict[str, int] = {}
    complaints = []
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry:
            continue
        name, colon, count = entry.rpartition(":")
        if colon and count == "0":
            entry = name  # the name is checked like others
        try:
            host = parse_host(entry, slots)
        except UsageError as error:
            complaints.append(f"line {number}: {error}")
            continue
        if host.name in seen:
            complaints.append(f"line {number}: the host {host.name} is named twice")
            continue
        seen.add(host.name)
        if not (colon and count == "0"):
            hosts[host.name] = host.slots
    return hosts, complaints


class DiscoveredHosts:
    """The hosts of one moment, with their slots. It never changes."""

    def __init__(self, host_slots: Mapping[str, int], host_assignment_order: Sequence[str]) -> None:
        self._slots = dict(host_slots)
        self._order = tuple(host_assignment_order)

    @property
    def host_slots(self) -> dict[str, int]:
        """The slots of each host that was found, also of excluded ones."""
        return dict(self._slots)

    @property
    def host_assignment_order(self) -> list[str]:
        """The hosts that may be used, in the order in which ranks are assigned to them."""
        return list(self._order)

    @property
    def available_hosts(self) -> set[str]:
        """The hosts that may be used."""
        return set(self._order)

    def get_slots(self, host: str) -> int:
        """The slots of a host; 0 if it was not found."""
        return self._slots.get(host, 0)

    def count_available_slots(self) -> int:
        """The slots of all hosts that may be used."""
        return sum(self._slots[host] for host in self._order)


class HostManager:
    """Which hosts may be used: those that were found last, without those on which processes have failed.

    Hosts keep their places in the order as long as they exist, and new ones follow. The ranks of a host that stays
    therefore stay the lowest."""

    def __init__(
        self,
        discovery: HostDiscovery,
        cooldown_range: tuple[float, float] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``cooldown_range``: the least and most seconds for which a host is excluded after a failure; the time
        doubles with each failure. Without it, a host is excluded for the rest of the job. ``clock``: seconds.
        ``draw``: a random number below 1, by which the time of several hosts differs.

        Errors: ValueError for a wrong range."""
        if cooldown_range is not None and not 0 < cooldown_range[0] <= cooldown_range[1]:
            raise ValueError(f"a cooldown range is (least, most) seconds, not {cooldown_range}")
        self._discovery = discovery
        self._range = cooldown_range
        self._clock = clock
        self._draw = draw
        self._found: dict[str, int] = {}
        self._order: list[str] = []
        self._reported: dict[
            str, int
        ] = {}  # slots of the hosts that could be used at the last update
        self._failures: dict[str, int] = {}
        self._excluded_until: dict[str, float] = {}

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """The hosts that were found last."""
        usable = [host for host in self._order if not self.is_blacklisted(host)]
        return DiscoveredHosts(self._found, usable)

    def update_available_hosts(self) -> HostUpdateResult:
        """Find the hosts again and say how those that may be used have changed. Errors: those of the discovery."""
        found = self._discovery.find_available_hosts_and_slots()
        self._found = {host: slots for host, slots in found.items() if slots > 0}
        self._order = [host for host in self._order if host in self._found]
        self._order += [host for host in self._found if host not in self._order]
        # The job knows of the hosts that it has excluded itself.
        before = {h: n for h, n in self._reported.items() if not self.is_blacklisted(h)}
        hosts = self.current_hosts
        after = self._reported = {h: hosts.get_slots(h) for h in hosts.host_assignment_order}
        result = HostUpdateResult.no_update
        if any(n > before.get(host, 0) for host, n in after.items()):
            result |= HostUpdateResult.added
        if any(n > after.get(host, 0) for host, n in before.items()):
            result |= HostUpdateResult.removed
        return result

    def blacklist(self, host: str) -> None:
        """A process has failed on this host: exclude it."""
        if self.is_blacklisted(host):
            return
        failures = self._failures[host] = self._failures.get(host, 0) + 1
        if self._range is None:
            self._excluded_until[host] = float("inf")
            return
        least, most = self._range
        seconds = least * 2.0 ** min(failures - 1, 60)
        # Hosts that failed together do not all come back, and maybe fail, in the same moment.
        seconds = min(seconds * (1 + self._draw() / 2), most)
        self._excluded_until[host] = self._clock() + seconds

    @property
    def next_return(self) -> float | None:
        """When the next excluded host may be used again, by the clock; None if none ever is."""
        times = [time for host, time in self._excluded_until.items() if host in self._found]
        now = self._clock()
        return min((time for time in times if now < time < float("inf")), default=None)

    def is_blacklisted(self, host: str) -> bool:
        """Whether the host is excluded now."""
        return self._clock() < self._excluded_until.get(host, float("-inf"))
