"""The processes by which an agent reaches agents of further hosts, with programs of the test in place of ssh."""

import os
import selectors
import signal
import subprocess

import pytest

from horoplug.runner.agent.agent import FIRST_TUNNEL, Tunnels
from tests.harness.limits import scaled

FIRST, SECOND = FIRST_TUNNEL, FIRST_TUNNEL - 1


@pytest.fixture
def tunnels():
    """The tunnels of an agent, and a function that opens one to a program. Programs that run at the end are killed."""
    selector = selectors.DefaultSelector()
    made = Tunnels(selector)
    started = []

    def open_tunnel(number, *command):
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe))
        made.add(number, started[-1])
        return started[-1]

    yield made, open_tunnel, selector
    for process in started:
        process.kill()
        process.wait()
        for end in (process.stdin, process.stdout):
            end.close()
    selector.close()


def write_all(made, selector):
    """Write what is queued whenever a program reads, until nothing is left."""
    while selector.get_map():
        for key, _ in selector.select(20):
            assert made.flush(key.fd)


def test_bytes_of_each_tunnel_arrive_in_order(tunnels):
    made, open_tunnel, selector = tunnels
    programs = [open_tunnel(number, "cat") for number in (FIRST, SECOND)]
    sent = [os.urandom(1 << 18) for _ in programs]
    readers = [subprocess.Popen(["sha256sum"], stdin=each.stdout, stdout=-1) for each in programs]
    for at in range(0, 1 << 18, 1000):
        for number, data in zip((FIRST, SECOND), sent, strict=True):
            made.send(number, data[at : at + 1000])
    for number in (FIRST, SECOND):
        made.send(number, b"")
    write_all(made, selector)
    for reader, data in zip(readers, sent, strict=True):
        expected = subprocess.run(["sha256sum"], input=data, capture_output=True, check=True)
        assert reader.communicate(timeout=scaled(20))[0] == expected.stdout


def test_end_closes_all_inputs(tunnels):
    made, open_tunnel, _ = tunnels
    programs = [open_tunnel(number, "cat") for number in (FIRST, SECOND)]
    made.end()
    assert [program.wait(scaled(20)) for program in programs] == [0, 0]


def test_killing_one_tunnel_spares_the_others(tunnels):
    made, open_tunnel, _ = tunnels
    first, second = (open_tunnel(number, "sleep", "600") for number in (FIRST, SECOND))
    made.kill(FIRST)
    assert first.wait(scaled(20)) == -signal.SIGKILL
    assert second.poll() is None
    made.kill()
    assert second.wait(scaled(20)) == -signal.SIGKILL


def test_bytes_for_a_tunnel_that_has_ended_are_dropped(tunnels):
    made, open_tunnel, selector = tunnels
    program = open_tunnel(FIRST, "true")
    code = program.wait(scaled(20))
    made.send(FIRST, b"x" * 1000)
    assert made.remove(program.pid, code) == FIRST
    made.send(FIRST, b"x")
    assert not made.numbers
    assert not selector.get_map()
