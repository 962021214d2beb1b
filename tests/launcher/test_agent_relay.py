"""What an agent sends to the launcher: frames and the output of processes, with pipes of the test in place of both."""

import os
import selectors

import pytest

from horoplug.runner.agent.agent import FRAME, GREETING, STDERR, STDOUT, Relay

HIGH_WATER = 1 << 20
CHUNK = b"x" * (1 << 12)


def open_pipe():
    reader, writer = os.pipe()
    return os.fdopen(reader, "rb", buffering=0), os.fdopen(writer, "wb", buffering=0)


class RelayedPipes:
    """A relay between the pipe of a process and that of the launcher."""

    def __init__(self):
        self.launcher, self._out = open_pipe()
        self._in, self.process = open_pipe()
        for end in (self._out, self.launcher):
            os.set_blocking(end.fileno(), False)
        self.selector = selectors.DefaultSelector()
        self.relay = Relay(self.selector, self._out.fileno())

    def add(self, rank=0, kind=STDOUT):
        self.relay.add(rank, self._in, kind)

    def reads(self):
        """Whether the relay waits for output of the process."""
        return self._in.fileno() in self.selector.get_map()

    def relay_once(self):
        for key, _ in self.selector.select(0):
            self.relay.read(key.fd)
        return self.relay.flush()

    def received(self):
        """All bytes that have reached the launcher."""
        data = b""
        while self.relay.flush() and (part := self.launcher.read(1 << 16)):
            data += part
        return data

    def close(self):
        self.selector.close()
        for end in (self.launcher, self._out, self._in, self.process):
            end.close()


@pytest.fixture
def pipes():
    made = RelayedPipes()
    made.relay.flush()
    assert made.received() == GREETING
    yield made
    made.close()


def frame(kind, rank, payload=b""):
    return FRAME.pack(kind, rank, len(payload)) + payload


def test_output_arrives_as_frames_in_order(pipes):
    pipes.add(rank=3, kind=STDERR)
    pipes.relay.send(b"P", 3, b"1234")
    pipes.process.write(b"text")
    assert pipes.relay_once()
    assert pipes.received() == frame(b"P", 3, b"1234") + frame(STDERR, 3, b"text")
    assert pipes.relay.is_empty


def test_slow_launcher_pauses_the_processes(pipes):
    pipes.add()
    while pipes.reads():
        pipes.process.write(CHUNK)
        assert pipes.relay_once()
    assert not pipes.relay.is_empty
    assert len(pipes.received()) > HIGH_WATER
    assert pipes.relay.is_empty
    assert pipes.reads()


def test_held_output_waits_in_the_pipe(pipes):
    pipes.add()
    pipes.relay.hold(True)
    pipes.relay.flush()
    pipes.process.write(b"text")
    assert pipes.relay_once()
    assert (pipes.reads(), pipes.received()) == (False, b"")
    pipes.relay.hold(False)
    pipes.relay.flush()
    assert pipes.relay_once()
    assert pipes.received() == frame(STDOUT, 0, b"text")


def test_output_of_a_process_that_starts_while_output_is_held_is_read_later(pipes):
    pipes.relay.hold(True)
    pipes.relay.flush()
    pipes.add()
    assert not pipes.reads()
    pipes.relay.hold(False)
    pipes.relay.flush()
    assert pipes.reads()


def test_drain_sends_what_dead_processes_have_left(pipes):
    pipes.add(rank=1)
    pipes.relay.hold(True)
    pipes.relay.flush()
    pipes.process.write(b"text")
    pipes.process.close()
    pipes.relay.drain(of=2)
    assert pipes.received() == b""
    pipes.relay.drain(of=1)
    assert pipes.received() == frame(STDOUT, 1, b"text")


def test_frames_are_dropped_once_the_launcher_is_gone(pipes):
    pipes.add()
    pipes.launcher.close()
    pipes.relay.send(b"A", -1)
    assert not pipes.relay.flush()
    pipes.process.write(b"text")
    assert pipes.relay_once()
    assert pipes.relay.is_empty
