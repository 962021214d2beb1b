"""What an agent sends to the launcher: frames and the output of processes, with pipes of the test in place of both."""

import os
import selectors

import pytest

from horoplug.runner.agent import FRAME, GREETING, STDERR, STDOUT, Relay

HIGH_WATER = 1 << 20
CHUNK = b"x" * (1 << 12)


def open_pipe():
    reader, writer = os.pipe()
    return os.fdopen(reader, "rb", buffering=0), os.fdopen(writer, "wb", buffering=0)


class Line:
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
def line():
    made = Line()
    made.relay.flush()
    assert made.received() == GREETING
    yield made
    made.close()


def frame(kind, rank, payload=b""):
    return FRAME.pack(kind, rank, len(payload)) + payload


def test_output_arrives_as_frames_in_order(line):
    line.add(rank=3, kind=STDERR)
    line.relay.send(b"P", 3, b"1234")
    line.process.write(b"text")
    assert line.relay_once()
    assert line.received() == frame(b"P", 3, b"1234") + frame(STDERR, 3, b"text")
    assert line.relay.is_empty


def test_slow_launcher_pauses_the_processes(line):
    line.add()
    while line.reads():
        line.process.write(CHUNK)
        assert line.relay_once()
    assert not line.relay.is_empty
    assert len(line.received()) > HIGH_WATER
    assert line.relay.is_empty
    assert line.reads()


def test_held_output_waits_in_the_pipe(line):
    line.add()
    line.relay.hold(True)
    line.relay.flush()
    line.process.write(b"text")
    assert line.relay_once()
    assert (line.reads(), line.received()) == (False, b"")
    line.relay.hold(False)
    line.relay.flush()
    assert line.relay_once()
    assert line.received() == frame(STDOUT, 0, b"text")


def test_process_that_starts_while_output_is_held(line):
    line.relay.hold(True)
    line.relay.flush()
    line.add()
    assert not line.reads()
    line.relay.hold(False)
    line.relay.flush()
    assert line.reads()


def test_drain_sends_what_dead_processes_have_left(line):
    line.add(rank=1)
    line.relay.hold(True)
    line.relay.flush()
    line.process.write(b"text")
    line.process.close()
    line.relay.drain(of=2)
    assert line.received() == b""
    line.relay.drain(of=1)
    assert line.received() == frame(STDOUT, 1, b"text")


def test_frames_are_dropped_once_the_launcher_is_gone(line):
    line.add()
    line.launcher.close()
    line.relay.send(b"A", -1)
    assert not line.relay.flush()
    line.process.write(b"text")
    assert line.relay_once()
    assert line.relay.is_empty
