"""The status line of the launcher: its text, and that it appears on terminals only."""

import os
import pty
import re
import secrets
import select
import subprocess
import sys
import termios
import time

import pytest

from horoplug.base.config import Config
from horoplug.rendezvous.store.report import KEY, Counters, Report, pack, unpack
from horoplug.rendezvous.store.server import StoreServer
from horoplug.runner.output import output, status
from horoplug.runner.output.status import Status
from tests.harness import program_text
from tests.harness.limits import scaled
from tests.harness.screen import Screen
from tests.harness.support import environment, until

# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.short
def test_status_line_text():
    line = Status(4, now=100.0)
    assert line.due == 101.0

    def at(now, *, started=4, up=4, ended=0, counters=None):
        text = line.line(now, started=started, up=up, ended=ended, counters=counters)
        assert line.due == now + status.SECONDS
        return text.removeprefix("horovodrun: ")

    assert at(101, started=0, up=0) == "waiting for the hosts of 4 ranks, 0:00:01"
    assert at(102, up=0) == "4 processes, 0:00:02"
    assert at(103, up=3) == "3 of 4 ranks up, 0:00:03"
    assert at(104) == "4 ranks up, 0:00:04"
    assert at(105, counters=Counters(10, 1000)) == "4 ranks up, 0:00:05"
    assert at(107, counters=Counters(30, 3_001_000)) == (
        "4 ranks up, 0:00:07, 1.5 MB/s in 10 tensors/s"
    )
    # Unchanged counters keep the line; after a longer time it reports that nothing happens.
    assert at(108, counters=Counters(30, 3_001_000)).endswith("1.5 MB/s in 10 tensors/s")
    assert at(112, counters=Counters(30, 3_001_000)).endswith("0.0 B/s in 0 tensors/s")
    # After another init the counters start from zero.
    assert at(113, counters=Counters(1, 10)) == "4 ranks up, 0:00:13"
    assert at(114, counters=Counters(2, 2_000_000_010)).endswith("2.0 GB/s in 1 tensors/s")
    assert at(3761, up=0, ended=3) == "1 process, 3 ended, 1:01:01"


def test_status_line_needs_terminals():
    assert status.wanted({"TERM": "xterm"}, [True, True])
    for terminals in ([False, True], [True, False]):
        assert not status.wanted({"TERM": "xterm"}, terminals)
    assert not status.wanted({"TERM": "dumb"}, [True, True])
    assert not status.wanted({}, [True, True])


@pytest.mark.parametrize("value", [None, b"", b"{", b"[]", b"3", b'{"tensors": 1}', b"\xff"])
def test_invalid_counter_reports_are_ignored(value):
    assert unpack(value) is None


def test_counter_reports_are_packed_and_unpacked():
    assert unpack(pack({"tensors": 3, "bytes": 4, "batches": 5})) == Counters(3, 4)


def test_counter_reports_reach_the_server():
    secret = secrets.token_bytes(32)
    stats = {"tensors": 0, "bytes": 7}
    with StoreServer(secret) as server:
        config = Config(
            rendezvous_addr=server.address[0],
            rendezvous_port=server.address[1],
            secret_key=secret,
            status_seconds=0.01,
        )
        asked = []
        report = Report(config, lambda: asked.append(1) or stats)
        until(lambda: unpack(server.value(KEY)) == Counters(0, 7))
        stats["tensors"] = 5
        until(lambda: unpack(server.value(KEY)) == Counters(5, 7))
        report.close()
        count = len(asked)
        assert server.present() == 0, "the connection is nobody's"
    assert len(asked) == count


# ---- display ---------------------------------------------------------------------------------------------------------

CLEAR = b"\r\x1b[K"


def test_status_line_stays_below_output_and_progress_bars():
    screen = Screen(True)
    merged = output.RankOutput(2, (screen, screen))
    merged.feed(0, 0, b"text\n")
    assert screen.data == b"[0]<stdout>:text\n"
    screen.data = b""
    merged.show_status("up")
    assert screen.data == CLEAR + b"up"
    screen.data = b""
    merged.feed(1, 0, b"more\nand")
    assert screen.data == CLEAR + b"[1]<stdout>:more\nup"
    screen.data = b""
    merged.feed(0, 1, b"\r10%")
    assert screen.data == CLEAR + b"[0]<stderr>:10%"
    screen.data = b""
    merged.show_status("still up")
    assert screen.data == b""
    merged.feed(1, 1, b"text\n")
    assert screen.data == CLEAR + b"[1]<stderr>:text\n[0]<stderr>:10%"
    screen.data = b""
    merged.feed(0, 1, b"\r100%\n")
    assert screen.data == CLEAR + CLEAR + b"[0]<stderr>:100%\nstill up"
    screen.data = b""
    merged.close()
    assert screen.data == CLEAR + b"[1]<stdout>:and\n"


def test_status_line_stays_while_output_goes_to_a_file():
    out, err = Screen(False), Screen(True)
    merged = output.RankOutput(1, (out, err))
    merged.show_status("up")
    merged.feed(0, 0, b"text\n")
    assert out.data == b"[0]<stdout>:text\n"
    assert err.data == CLEAR + b"up"
    merged.notice("horovodrun: something")
    assert err.data == CLEAR + b"up" + CLEAR + b"horovodrun: something\nup"


def test_status_line_is_not_drawn_in_the_background():
    screen = Screen(True)
    merged = output.RankOutput(1, (screen, screen))
    merged.show_status("up")
    screen.data = b""
    merged.show_status("", draw=False)
    assert screen.data == b""
    merged.feed(0, 0, b"text\n")
    assert screen.data == b"[0]<stdout>:text\n"


# ---- on a terminal ---------------------------------------------------------------------------------------------------

QUICK = """
import sys
from horoplug.runner.output import status
status.SECONDS = 0.05
from horoplug.runner import launch
sys.exit(launch.main())
"""

WORK = program_text("tests/launcher/programs/status_work.py")


# A shell with job control starts a job in a new process group, in the foreground or background of the terminal.
IN_FOREGROUND = f"""
import fcntl, os, signal, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
def alone():
    os.setpgrp()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, os.getpgrp())
command = [sys.executable, "-c", {QUICK!r}, *sys.argv[1:]]
sys.exit(subprocess.run(command, preexec_fn=alone).returncode)
"""
IN_BACKGROUND = IN_FOREGROUND.replace("    os.tcsetpgrp(0, os.getpgrp())\n", "")


class Terminal:
    """A job on a terminal of 80 columns, and its output there."""

    def __init__(self, *arguments, stdout=None, program=QUICK, **variables):
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            env=environment() | {"TERM": "xterm"} | variables,
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.data = b""

    def read(self, pattern=None, timeout=40):
        """Read until a pattern was written, or to the end. Returns the match."""
        deadline = time.monotonic() + scaled(timeout)
        while True:
            if pattern and (match := re.search(pattern, self.data)):
                return match
            assert select.select([self.master], [], [], deadline - time.monotonic())[0], self.data
            try:
                piece = os.read(self.master, 1 << 16)
            except OSError:  # the other end is closed
                piece = b""
            if not piece:
                assert pattern is None, self.data
                return None
            self.data += piece

    def screen(self):
        """The lines that remain on the screen of a terminal."""
        lines = [""]
        for piece in re.findall(r"\r\n|\r\x1b\[K|[^\r\x1b]+|.", self.data.decode(), re.DOTALL):
            if piece == "\r\n":
                lines.append("")
            else:
                lines[-1] = "" if piece == "\r\x1b[K" else lines[-1] + piece
        return lines

    def close(self):
        self.process.kill()
        self.process.wait(scaled(10))
        if self.process.stdout is not None:
            self.process.stdout.close()
        os.close(self.master)


@pytest.fixture
def terminal():
    made = []

    def make(*arguments, **variables):
        made.append(Terminal(*arguments, **variables))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_progress_bar_that_is_wider_than_the_terminal_keeps_to_one_row(terminal):
    program = """
import time
from tqdm import tqdm
for step in tqdm(range(20), desc="x" * 70, mininterval=0, ncols=150):
    time.sleep(0.02)  # so that some states of the bar are shown
"""
    job = terminal("-np", 1, sys.executable, "-c", program)
    job.read()
    assert job.process.wait(scaled(20)) == 0
    bars = re.findall(r"\r\x1b\[K(\[0\]<stderr>:x+[^\r\n]*)(?=\r\x1b)", job.data.decode())
    assert bars
    assert max(map(len, bars)) < 80
    assert any(re.search(r"20/20 ", line) for line in job.screen())  # the last state, in full


@pytest.mark.short
def test_job_on_a_terminal_shows_the_status_line(terminal, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    job = terminal("-np", 2, sys.executable, "-c", WORK, gate)
    job.read(rb"horovodrun: 2 ranks up, 0:00:\d\d, [\d.]+ k?M?B/s in \d+ tensors/s")
    (tmp_path / "gate.over").touch()
    job.read()
    assert job.process.wait(scaled(20)) == 0
    *lines, last = job.screen()
    assert last == ""
    assert len(lines) > 3
    for line in lines:
        assert re.fullmatch(
            r"\[(\d)\]<stdout>:line \1 \d+ x{40}|\[\d\]<stderr>:(bar \d+)?", line
        ), line


@pytest.mark.parametrize(
    ("flags", "variables"), [(["--no-status"], {}), ([], {"TERM": "dumb"}), ([], {"TERM": ""})]
)
def test_job_on_a_terminal_without_the_status_line(terminal, flags, variables):
    job = terminal("-np", 1, *flags, "sh", "-c", "echo hello; sleep 0.2", **variables)
    job.read()
    assert job.data == b"[0]<stdout>:hello\r\n"
    assert job.process.wait(scaled(20)) == 0


def test_background_job_of_a_shell_shows_no_status_line(terminal):
    """The shell owns the terminal then, and only the output of jobs appears."""
    job = terminal("-np", 1, "sh", "-c", "echo hello; sleep 0.5", program=IN_BACKGROUND)
    job.read()
    assert job.data == b"[0]<stdout>:hello\r\n"
    assert job.process.wait(scaled(20)) == 0
    job = terminal("-np", 1, "sh", "-c", "echo hello; sleep 0.5", program=IN_FOREGROUND)
    job.read(rb"horovodrun: 1 process, 0:00:00")


def test_piped_output_has_no_status_line(terminal):
    """The pipe may lead to the same terminal."""
    job = terminal("-np", 1, "sh", "-c", "echo hello; sleep 0.2", stdout=subprocess.PIPE)
    assert job.process.stdout.read() == b"[0]<stdout>:hello\n"
    job.read()
    assert job.data == b""


def test_failure_message_stays_on_the_terminal(terminal):
    job = terminal("-np", 2, "sh", "-c", "sleep 0.3; exit 3")
    job.read()
    assert b"horovodrun: 2 processes, 0:00:00" in job.data
    assert re.fullmatch(r"horovodrun: rank \d exited with code 3.*", job.screen()[-2])
    assert job.process.wait(scaled(20)) == 3
