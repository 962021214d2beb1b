"""Which hosts an elastic job may use: discovery scripts, and hosts that fail, leave and come back."""

import os
import random
import signal
import socket

import pytest

from horoplug.runner.elastic.discovery import (
    DiscoveryError,
    FixedHosts,
    HostDiscoveryScript,
    HostManager,
    HostUpdateResult,
    MergedHosts,
    parse_output,
)
from horoplug.runner.hosts.hosts import Machines
from tests.harness.support import has_ended, process_memory, seed, until

ADDED, REMOVED = HostUpdateResult.added, HostUpdateResult.removed


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def script(folder, text):
    path = folder / "discover.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# ---- scripts --------------------------------------------------------------------------------------------------------


def test_script_prints_hosts(tmp_path):
    path = script(tmp_path, "echo one:4; echo; echo ' two '; echo '[fe80::1]:2'; echo user@three:8")
    found = HostDiscoveryScript(path, 3).find_available_hosts_and_slots()
    assert found == {"one": 4, "two": 3, "fe80::1": 2, "user@three": 8}


def test_script_may_be_a_command_with_arguments():
    discovery = HostDiscoveryScript("printf 'a:1\\nb\\n' | sed s/a/c/")
    assert discovery.find_available_hosts_and_slots() == {"c": 1, "b": 1}


def test_script_without_hosts_finds_none():
    assert HostDiscoveryScript("true").find_available_hosts_and_slots() == {}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("-oProxyCommand=x:1", "host or host:slots is wanted, not '-oProxyCommand=x:1'"),
        ("a host:2", "host or host:slots is wanted, not 'a host:2'"),
        ("one:two", "host or host:slots is wanted, not 'one:two'"),
        ("one:-1", "host or host:slots is wanted, not 'one:-1'"),
        (":3", "host or host:slots is wanted, not ':3'"),
        (":0", "host or host:slots is wanted, not ''"),
        ("good:2", "the host good is named twice"),
        ("\x00\x1b[31m", "host or host:slots is wanted, not '\\x00\\x1b[31m'"),
    ],
)
def test_wrong_line_is_named_and_the_others_are_used(line, complaint):
    assert parse_output(f"good:1\n{line}\nlast\n") == (
        {"good": 1, "last": 1},
        [f"line 2: {complaint}"],
    )


def test_host_without_slots_is_left_out():
    assert parse_output("a:0\nb:2\na:3\n") == ({"b": 2}, ["line 3: the host a is named twice"])


def test_any_output_gives_hosts_or_complaints():
    draw = random.Random(seed())
    alphabet = "ab.:@[]0129- \t\n\r\x00\x85é%"
    for _ in range(3000):
        text = "".join(draw.choices(alphabet, k=draw.randrange(30)))
        hosts, complaints = parse_output(text)
        lines = [line for line in text.splitlines() if line.strip()]
        zero = sum(line.strip().endswith(":0") for line in lines)
        assert len(lines) - zero <= len(hosts) + len(complaints) <= len(lines)
        assert all("\n" not in complaint and "\x00" not in complaint for complaint in complaints)
        assert all(slots > 0 and not host.startswith("-") for host, slots in hosts.items())


def test_failure_of_the_script_is_one_line(tmp_path):
    path = script(tmp_path, "echo one:1; echo connecting >&2; echo 'no such cluster' >&2; exit 3")
    with pytest.raises(DiscoveryError) as caught:
        HostDiscoveryScript(path).find_available_hosts_and_slots()
    assert str(caught.value) == f"{path} failed with exit code 3: no such cluster"


def test_missing_script_is_one_line(tmp_path):
    with pytest.raises(DiscoveryError, match=r"failed with exit code 127: .*not found") as caught:
        HostDiscoveryScript(str(tmp_path / "none.sh")).find_available_hosts_and_slots()
    assert "\n" not in str(caught.value)


def test_output_without_any_host_is_an_error():
    with pytest.raises(DiscoveryError, match="line 1: host or host:slots is wanted, not 'Error: "):
        HostDiscoveryScript("echo Error: none").find_available_hosts_and_slots()


def hang(command, pids):
    """Run a discovery that does not end and writes the ids of its processes to a file, which are returned. The limit
    grows until the script has had the time to write them."""
    for timeout in (0.5, 2, 8, 30):
        with pytest.raises(DiscoveryError, match=f"did not end within {timeout:g} s"):
            HostDiscoveryScript(command, timeout=timeout).find_available_hosts_and_slots()
        if pids.exists() and pids.read_text().endswith("\n"):
            return pids.read_text().split()
    raise AssertionError("the script has not started")


def test_hanging_script_ends_at_its_limit_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    for pid in hang(script(tmp_path, f"sleep 300 & echo $$ $! > {pids}; wait"), pids):
        until(lambda pid=pid: has_ended(pid))


@pytest.mark.parametrize("stream", [1, 2])
def test_endless_output_is_refused(stream):
    """The script is ended as soon as it has printed too much, so that the launcher's memory stays bounded."""
    before = process_memory("self", "VmHWM")
    with pytest.raises(DiscoveryError, match="printed more than 1048576 bytes"):
        HostDiscoveryScript(f"yes >&{stream}", timeout=120).find_available_hosts_and_slots()
    assert process_memory("self", "VmHWM") - before < 64 << 20


def test_script_that_closes_its_output_and_goes_on_is_late():
    with pytest.raises(DiscoveryError, match=r"did not end within 0\.5 s"):
        HostDiscoveryScript(
            "exec >&- 2>&-; exec sleep 300", timeout=0.5
        ).find_available_hosts_and_slots()


def test_child_that_keeps_the_output_open_does_not_hold_up_the_job(tmp_path):
    pids = tmp_path / "pids"
    (pid,) = hang(script(tmp_path, f"setsid sleep 300 & echo $! > {pids}; wait"), pids)
    os.kill(int(pid), signal.SIGKILL)  # it has left the script's session


# ---- hosts that come and go -----------------------------------------------------------------------------------------


def test_hosts_keep_their_order():
    discovery = FixedHosts({"a": 1, "b": 2})
    manager = HostManager(discovery)
    assert manager.update_available_hosts() == ADDED
    discovery.set({"c": 1, "b": 2, "a": 1})
    assert manager.update_available_hosts() == ADDED
    assert manager.current_hosts.host_assignment_order == ["a", "b", "c"]
    discovery.set({"c": 1, "b": 2})
    assert manager.update_available_hosts() == REMOVED
    discovery.set({"a": 1, "c": 1, "b": 2})
    assert manager.update_available_hosts() == ADDED
    assert manager.current_hosts.host_assignment_order == ["b", "c", "a"]
    assert manager.update_available_hosts() == HostUpdateResult.no_update


def test_numbers_of_slots_change():
    discovery = FixedHosts({"a": 2, "b": 2})
    manager = HostManager(discovery)
    manager.update_available_hosts()
    discovery.set({"a": 3, "b": 2})
    assert manager.update_available_hosts() == ADDED
    discovery.set({"a": 4, "b": 1})
    assert manager.update_available_hosts() == HostUpdateResult.mixed
    assert manager.current_hosts.count_available_slots() == 5
    discovery.set({"a": 4, "b": 0})
    assert manager.update_available_hosts() == REMOVED
    assert manager.current_hosts.available_hosts == {"a"}


def test_failed_host_is_excluded_for_good_without_a_cooldown():
    clock = Clock()
    manager = HostManager(FixedHosts({"a": 1, "b": 1}), clock=clock)
    manager.update_available_hosts()
    manager.blacklist("a")
    assert manager.update_available_hosts() == HostUpdateResult.no_update  # the job knows
    clock.now += 1e9
    assert manager.update_available_hosts() == HostUpdateResult.no_update
    assert manager.current_hosts.host_assignment_order == ["b"]
    assert manager.is_blacklisted("a")


def test_failed_host_comes_back_after_a_cooldown_that_grows():
    clock = Clock()
    manager = HostManager(FixedHosts({"a": 1, "b": 1}), (10, 50), clock=clock, draw=lambda: 0.0)
    manager.update_available_hosts()
    for seconds in (10, 20, 40, 50, 50):
        manager.blacklist("a")
        manager.blacklist("a")  # a second process of the same failure
        clock.now += seconds - 1
        assert manager.update_available_hosts() == HostUpdateResult.no_update
        clock.now += 2
        assert manager.update_available_hosts() == ADDED
        # It keeps its place: its ranks would be the lowest again.
        assert manager.current_hosts.host_assignment_order == ["a", "b"]


def test_cooldowns_of_hosts_that_failed_together_differ():
    clock = Clock()
    draw = random.Random(seed())
    manager = HostManager(
        FixedHosts(dict.fromkeys("abcdef", 1)), (10, 1000), clock=clock, draw=draw.random
    )
    manager.update_available_hosts()
    for host in "abcdef":
        manager.blacklist(host)
    returned = {}
    for _ in range(1600):
        clock.now += 0.01
        manager.update_available_hosts()
        for host in manager.current_hosts.available_hosts:
            returned.setdefault(host, clock.now - 1000)
    assert len(returned) == 6
    assert 9.9 < min(returned.values()) < max(returned.values()) < 15.1


def test_failing_discovery_keeps_the_hosts():
    class Failing(FixedHosts):
        fails = False

        def find_available_hosts_and_slots(self):
            if self.fails:
                raise DiscoveryError("the cluster does not answer")
            return super().find_available_hosts_and_slots()

    discovery = Failing({"a": 2})
    manager = HostManager(discovery)
    manager.update_available_hosts()
    discovery.fails = True
    with pytest.raises(DiscoveryError):
        manager.update_available_hosts()
    assert manager.current_hosts.host_slots == {"a": 2}


def test_every_look_merges_the_names_of_a_machine(tmp_path):
    """Here the names of this machine, in another order each time."""
    file = tmp_path / "hosts"
    own = [f"{socket.gethostname()}:1", "127.0.0.3:2", "localhost:4"]
    hosts = MergedHosts(HostDiscoveryScript(f"cat {file}"), Machines())
    for kept in ((0, 1, 2), (2, 1, 0), (1, 2), (2,), (1, 0, 2)):
        file.write_text("\n".join(["other.invalid:8", *(own[i] for i in kept), "two words"]))
        slots = sum(2**i for i in kept)
        found = hosts.find_available_hosts_and_slots()
        assert found == {"other.invalid": 8, socket.gethostname(): slots}
        (complaint,) = hosts.complaints
        assert "two words" in complaint


@pytest.mark.parametrize("wrong", [(0, 10), (10, 5), (-1, 1)])
def test_wrong_cooldown_range_is_refused(wrong):
    with pytest.raises(ValueError, match="a cooldown range is"):
        HostManager(FixedHosts({}), wrong)
