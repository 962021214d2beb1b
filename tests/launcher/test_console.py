"""The launcher's printing into pipes and files of the test: flow control, failed streams and the last line."""

import contextlib
import os
import select
import socket

import pytest

from horoplug.runner.agent.agent import CONTINUE, HOLD
from horoplug.runner.output import console as console_module
from horoplug.runner.output.console import Console
from horoplug.runner.output.outlet import HIGH_WATER, Outlets
from tests.harness.support import until

STDOUT, STDERR = 0, 1


@pytest.fixture
def wakeup():
    """The reading end of a socket at which nothing arrives."""
    ours, other = socket.socketpair()
    with ours, other:
        ours.setblocking(False)
        yield ours.fileno()


class Pipes:
    """Pipes for the launcher's stdout and stderr."""

    def __init__(self):
        self._read, self.write = zip(*(os.pipe() for _ in range(2)), strict=True)
        self.outlets = Outlets(*self.write)

    def read(self, stream, count):
        """The next ``count`` bytes of a stream."""
        data = b""
        while len(data) < count:
            assert select.select([self._read[stream]], [], [], 40)[0], data
            data += os.read(self._read[stream], count - len(data))
        return data

    def is_empty(self, stream):
        return not select.select([self._read[stream]], [], [], 0)[0]

    def close_reader(self, stream):
        os.close(self._read[stream])
        self._read = tuple(None if i == stream else fd for i, fd in enumerate(self._read))

    def close(self):
        for fd in self._read:
            if fd is not None:
                os.close(fd)
        # A thread that still writes notices that there is no reader. It must not find the descriptor reused.
        until(lambda: self.outlets.waiting == 0)
        for fd in self.write:
            os.close(fd)


@pytest.fixture
def pipes():
    with contextlib.closing(Pipes()) as made:
        yield made


def wait(console):
    """Wait until the console's descriptor is readable, and empty it."""
    assert select.select([console.wakeup], [], [], 40)[0]
    os.eventfd_read(console.wakeup)


def close(console, wakeup, last_line="", *, failed=False):
    console.close(last_line, wakeup, failed=failed, is_over=lambda: False)


def test_rank_output_and_last_line_go_to_their_streams(pipes, wakeup):
    console = Console(pipes.outlets, 2)
    console.feed(1, STDOUT, b"result\nincomplete")
    console.feed(0, STDERR, b"warning\n")
    close(console, wakeup, "rank 0 exited with code 1", failed=True)
    out = b"[1]<stdout>:result\n[1]<stdout>:incomplete\n"
    err = b"[0]<stderr>:warning\nhorovodrun: rank 0 exited with code 1\n"
    assert (pipes.read(STDOUT, len(out)), pipes.read(STDERR, len(err))) == (out, err)
    assert pipes.is_empty(STDOUT)
    assert pipes.is_empty(STDERR)


@pytest.mark.parametrize("verbose", [False, True])
def test_messages_are_printed_with_verbose_only(pipes, wakeup, verbose):
    console = Console(pipes.outlets, 1, verbose=verbose)
    console.say("rank 0 is pid 7")
    close(console, wakeup)
    if verbose:
        line = b"horovodrun: rank 0 is pid 7\n"
        assert pipes.read(STDERR, len(line)) == line
    assert pipes.is_empty(STDERR)


def test_ranks_are_held_while_the_reader_is_slow(pipes):
    console = Console(pipes.outlets, 1)
    assert console.check() is None
    line = b"x" * 1023 + b"\n"
    data = line * (2 * HIGH_WATER // len(line))
    console.feed(0, STDOUT, data)
    assert console.check() == HOLD
    assert console.check() is None
    pipes.read(STDOUT, len(data))  # without the prefixes, so that less than a pipe's size is left
    wait(console)
    while (command := console.check()) is None:
        wait(console)
    assert command == CONTINUE


def test_failed_stream_is_reported_once(pipes, wakeup):
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        console = Console(Outlets(full, pipes.write[STDERR]), 1)
        console.feed(0, STDOUT, b"lost\n")
        wait(console)
        assert console.check() is None
        assert console.check() is None
        close(console, wakeup)
    finally:
        os.close(full)
    line = b"horovodrun: stdout: No space left on device; nothing more is written there\n"
    assert pipes.read(STDERR, len(line)) == line
    assert pipes.is_empty(STDERR)


def test_ended_reader_is_an_error(pipes):
    console = Console(pipes.outlets, 1)
    pipes.close_reader(STDOUT)
    console.feed(0, STDOUT, b"lost\n")
    wait(console)
    with pytest.raises(BrokenPipeError):
        console.check()


def test_reader_that_accepts_nothing_is_given_up_after_a_failure(pipes, wakeup, monkeypatch):
    monkeypatch.setattr(console_module, "_STALLED_SECONDS", 0.2)
    console = Console(pipes.outlets, 1)
    console.feed(0, STDOUT, b"x" * (1 << 18) + b"\n")  # more than a pipe holds
    close(console, wakeup, "rank 0 exited with code 1", failed=True)
    first = b"horovodrun: rank 0 exited with code 1\nhorovodrun: "
    assert pipes.read(STDERR, len(first)) == first
    rest = pipes.read(STDERR, len(b"200000 bytes of output were not accepted and are lost\n"))
    assert rest.endswith(b" bytes of output were not accepted and are lost\n")


def test_signal_ends_the_wait_for_a_reader(pipes, wakeup):
    console = Console(pipes.outlets, 1)
    console.feed(0, STDOUT, b"x" * (1 << 18) + b"\n")
    console.close("", wakeup, failed=False, is_over=lambda: True)
    assert not pipes.is_empty(STDERR)  # a line tells how much is lost


def test_status_line_is_off_by_default(pipes):
    console = Console(pipes.outlets, 1)
    assert console.due is None
    console.show_status(0.0, None, started=0, ended=0)
    assert pipes.is_empty(STDERR)
