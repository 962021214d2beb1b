"""The end of a job: the reported failure, the exit code, and no process left, whichever process is killed."""

import contextlib
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from horoplug.runner.agent import agent as agent_module
from horoplug.runner.agent.source import agent_source
from horoplug.runner.ending.blame import CAUSE_SECONDS, LAST_WORDS_SECONDS, Blame, describe
from horoplug.runner.hosts.hosts import Placement
from horoplug.runner.start.connection import MAX_FRAME, AgentConnection, LostError
from horoplug.runner.start.ssh import Ssh
from horoplug.runner.start.starters import SshStarter
from tests.harness import ROOT
from tests.harness.limits import scaled
from tests.harness.support import until

MARK = "HOROPLUG_TEST_JOB"  # a variable that every process of a job inherits
NEVER = 600  # seconds: longer than any test
GRACE_PROMISE = 5.0  # seconds that a rank has to clean up between SIGTERM and SIGKILL
SPIN = "while True: signal.pause()"  # a rank that never ends by itself
PATIENT_LAUNCHER = f"""
import sys
from horoplug.runner.ending import blame; from horoplug.runner.job import job; from horoplug.runner import launch
job.GRACE_SECONDS = blame.CAUSE_SECONDS = blame.LAST_WORDS_SECONDS = {NEVER}
sys.exit(launch.main())
"""


class Run:
    """A launcher under test, and all its descendants. ``patient``: its time limits are too long to expire in a test,
    so that every action has another cause."""

    def __init__(self, *arguments, patient=False):
        self.mark = uuid.uuid4().hex
        program = ["-c", PATIENT_LAUNCHER] if patient else ["-m", "horoplug.runner"]
        self.process = subprocess.Popen(
            [sys.executable, *program, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(ROOT), MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # reading a line must not consume more of the pipe
        )

    def lines(self, count):
        """The next lines on stdout."""
        return [self._line(self.process.stdout) for _ in range(count)]

    def said(self, pattern):
        """Wait for a line of ``--verbose`` on stderr that matches. Returns the match."""
        while line := self._line(self.process.stderr):
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"ended without {pattern!r}")

    @staticmethod
    def _line(stream):
        assert select.select([stream], [], [], 40)[0], "nothing was printed"
        return stream.readline().decode()

    def finish(self, timeout=40):
        out, err = self.process.communicate(timeout=scaled(timeout))
        return self.process.returncode, out.decode(), err.decode()

    def processes(self):
        """All live processes of this job, the launcher included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get(MARK) == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def guard(self):
        """The process that waits for the agent; None before it has started."""
        return self._agent_below(self.process.pid)

    def agent(self):
        """The agent's process; None before it has started."""
        guard = self.guard()
        return guard and self._agent_below(guard.pid)

    @staticmethod
    def _agent_below(pid):
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(pid).children():
                if "".join(process.cmdline()[-1:]).endswith("agent.py"):
                    return process
        return None

    def wait_gone(self):
        until(lambda: not self.processes())

    def clean_up(self):
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.communicate()


@pytest.fixture
def run():
    """A function that starts launchers. No process of theirs may be left after the test."""
    started = []

    def start(*arguments, **options):
        started.append(Run(*arguments, **options))
        return started[-1]

    yield start
    left = [process for one in started for process in one.processes()]
    for one in started:
        one.clean_up()
    assert not left, left


class Gate:
    """A FIFO at which a rank waits until the test opens it."""

    def __init__(self, path):
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR)  # both ends, so that opening does not block
        self.wait = f"os.read(os.open({str(path)!r}, os.O_RDONLY), 1)"  # for the rank's program

    def open(self):
        os.write(self._fd, b"x")

    def close(self):
        os.close(self._fd)


@pytest.fixture
def gate(tmp_path):
    with contextlib.closing(Gate(tmp_path / "gate")) as made:
        yield made


def python(*lines):
    head = "import os, signal, sys; rank = int(os.environ['HOROVOD_RANK'])"
    return [sys.executable, "-c", "\n".join((head, *lines))]


def last_line(err):
    return err.splitlines()[-1]


def ends(err):
    """The end of each rank, in the order of the lines of ``--verbose``."""
    found = re.findall(
        r"^horovodrun: rank (\d+) (exited with code \d+|was killed by signal .*\))$",
        err,
        re.MULTILINE,
    )
    assert len({rank for rank, _ in found}) == len(found)
    return {int(rank): how for rank, how in found}


ASKED, KILLED = describe(-signal.SIGTERM), describe(-signal.SIGKILL)


# ---- exit codes and causes -------------------------------------------------------------------------------------------


@pytest.mark.short
def test_successful_job_exits_with_0(run):
    code, out, err = run("-np", 3, *python("print(rank)")).finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{r}]<stdout>:{r}" for r in range(3)]


def test_job_exits_with_the_first_exit_code(run):
    command = python("if rank == 1: sys.exit(7)", SPIN)
    code, _, err = run("-np", 3, "--verbose", *command).finish()
    assert code == 7
    assert last_line(err) == "horovodrun: rank 1 exited with code 7; the other ranks were ended"
    assert ends(err) == {1: "exited with code 7", 0: ASKED, 2: ASKED}
    assert next(iter(ends(err))) == 1


@pytest.mark.short(failure=True)
def test_single_failing_rank(run):
    code, _, err = run("-np", 1, "sh", "-c", "exit 3").finish()
    assert (code, err) == (3, "horovodrun: rank 0 exited with code 3\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_job_reports_the_first_signal(run, number):
    command = python(f"if rank == 1: os.kill(os.getpid(), {int(number)})", SPIN)
    code, _, err = run("-np", 3, *command).finish()
    assert code == 128 + number
    assert last_line(err) == (
        f"horovodrun: rank 1 was killed by signal {int(number)} ({number.name}); "
        "the other ranks were ended"
    )


@pytest.mark.short(failure=True)
def test_killed_rank_is_the_cause_not_ranks_that_fail_after_it(run, tmp_path):
    """Ranks 0 and 2 exit with 1 as soon as they notice that rank 1 is gone."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = python(
        "path = sys.argv[1]",
        "if rank == 1:",
        "    pipe = open(path, 'w')",
        "    print('ready')",
        "    signal.pause()",
        "open(path).read()",  # blocks until rank 1 is dead
        "sys.exit(1)",
    )
    job = run("-np", 3, "--verbose", *command, fifo)
    assert job.lines(1) == ["[1]<stdout>:ready\n"]
    os.kill(int(job.said(r"rank 1 is pid (\d+)")[1]), signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 137
    assert "rank 1 was killed by signal 9 (SIGKILL)" in last_line(err)


def test_rank_that_exited_first_is_the_cause(run, gate):
    """Rank 1 fails and notifies the others, which exit before its interpreter does."""
    command = python(
        "from horoplug.base.config import Config",
        "from horoplug.rendezvous.session import Rendezvous",
        "rendezvous = Rendezvous(Config.from_env())",
        "connections = rendezvous.connect(0)",
        "if rank == 1:",
        "    rendezvous.close()",
        "    for peer in connections.peers: os.close(peer[2])",
        f"    {gate.wait}",
        "    os._exit(9)",
        "import select",
        "stream = dict((p[0], p[2]) for p in connections.peers)[1]",
        "select.select([stream], [], [])",
        "os._exit(1)",
    )
    job = run("-np", 5, "--verbose", *command, patient=True)
    others = {int(job.said(r"rank (\d+) exited with code 1$")[1]) for _ in range(4)}
    assert others == {0, 2, 3, 4}
    gate.open()
    code, _, err = job.finish()
    assert code == 9
    assert "rank 1 exited with code 9" in last_line(err)


def test_surviving_ranks_print_their_errors_before_they_are_ended(run, gate):
    """The ranks have unlimited time for it in this test."""
    command = python(
        "import numpy as np",
        "import horoplug as hvd",
        "hvd.init()",
        "print('ready')",
        "try:",
        "    while True: hvd.allreduce(np.ones(3), name='grad/7')",
        "except hvd.HorovodInternalError as error:",
        f"    {gate.wait}",
        "    print(error)",
        "    sys.exit(1)",
    )
    job = run("-np", 3, "--verbose", *command, patient=True)
    job.lines(3)
    os.kill(int(job.said(r"rank 1 is pid (\d+)")[1]), signal.SIGKILL)
    job.said(r"rank 1 was killed by signal 9 \(SIGKILL\)$")
    for _ in range(2):
        gate.open()
    code, out, err = job.finish()
    assert code == 137
    assert last_line(err) == "horovodrun: rank 1 was killed by signal 9 (SIGKILL)"
    said = re.findall(
        r"^\[(\d)\]<stdout>:'allreduce.grad/7' .*: rank 1 has died", out, re.MULTILINE
    )
    assert sorted(said) == ["0", "2"], out


def test_grace_period_for_surviving_ranks():
    def due(others, **now):
        blame = Blame(range(3))
        blame.ended(1, -signal.SIGKILL, now=10.0, **now)
        for rank in others:
            blame.ended(rank, 1, [], 10.5)
        assert blame.first == 1
        return blame.due

    assert (
        due([], departures=[1]) == 10.0
    )  # ranks that never connected have no consequences to wait for
    assert due([], departures=[1], present=2) == 10.0 + LAST_WORDS_SECONDS
    assert due([0], departures=[1], present=2) == 10.0 + LAST_WORDS_SECONDS
    assert (
        due([], departures=[1, 2, 0]) == 10.0 + LAST_WORDS_SECONDS
    )  # the ranks have just left the rendezvous
    assert due([0, 2], departures=[1], present=2) == 10.5  # all ranks have ended by themselves
    assert due([], departures=[1], may_be_lost=True) == 10.0 + CAUSE_SECONDS
    assert due([0], departures=[1], present=2, may_be_lost=True) == 10.0 + CAUSE_SECONDS


def test_crash_is_the_cause_among_simultaneous_exits():
    codes = [0, 1, 1, -signal.SIGTERM, 128 + signal.SIGKILL, -signal.SIGSEGV]
    order = sorted(codes, key=agent_module.severity)
    assert order[:2] == [-signal.SIGSEGV, 128 + signal.SIGKILL]
    assert order[-1] == 0


def test_description_of_exit_statuses():
    assert describe(0) == "exited with code 0"
    assert describe(-9) == "was killed by signal 9 (SIGKILL)"
    assert describe(-40) == "was killed by signal 40"


def test_rank_that_ignores_sigterm_is_killed(run, gate):
    command = python(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "print('deaf')",
        "if rank == 1:",
        f"    {gate.wait}",
        "    sys.exit(4)",
        SPIN,
    )
    job = run("-np", 2, "--verbose", *command)
    job.lines(2)
    start = time.monotonic()
    gate.open()
    code, _, err = job.finish()
    assert code == 4
    assert "rank 1 exited with code 4" in last_line(err)
    assert ends(err) == {1: "exited with code 4", 0: KILLED}
    # A lower bound, which also holds on a slow machine.
    assert time.monotonic() - start >= GRACE_PROMISE


def test_output_of_ranks_that_clean_up_is_forwarded(run, gate):
    command = python(
        "def tidy(*_):",
        "    print('tidied up', end='')",
        "    sys.exit(0)",
        "signal.signal(signal.SIGTERM, tidy)",
        "print('ready')",
        "if rank == 1:",
        f"    {gate.wait}",
        "    sys.exit(4)",
        SPIN,
    )
    job = run("-np", 2, *command)
    job.lines(2)
    gate.open()
    code, out, _ = job.finish()
    assert code == 4
    assert "[0]<stdout>:tidied up\n" in out


def test_rank_that_exits_without_init_fails_the_others_at_once(run):
    """Rank 1 exits with 0 before it has connected to the others, which do not wait for the start timeout."""
    command = python(
        "if rank == 1: sys.exit(0)",
        "from horoplug.base.config import Config",
        "from horoplug.rendezvous.session import Rendezvous",
        "Rendezvous(Config.from_env()).connect(0)",
    )
    code, _, err = run("-np", 2, "--start-timeout", NEVER, *command).finish()
    assert code == 1
    assert "PeerLostError: rank 1 exited with code 0" in err


# ---- signals to the launcher -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "terminated"),
        (signal.SIGHUP, "ended by SIGHUP"),
    ],
)
@pytest.mark.short(failure=True)
def test_signal_to_the_launcher_ends_all_ranks(run, number, word):
    job = run("-np", 3, "--verbose", *python("print('ready')", SPIN))
    job.lines(3)
    job.process.send_signal(number)
    code, _, err = job.finish()
    assert code == 128 + number
    assert last_line(err) == f"horovodrun: {word}; all ranks were ended"
    assert ends(err) == dict.fromkeys(range(3), ASKED)
    # The only other lines are those of --verbose: the rendezvous, and each rank's start and end.
    assert len(err.splitlines()) == 1 + 3 + 3 + 1


def test_second_interrupt_kills_the_ranks(run):
    command = python(
        "signal.signal(signal.SIGTERM, lambda *_: print('no'))", "print('ready')", SPIN
    )
    job = run("-np", 2, "--verbose", *command, patient=True)
    job.lines(2)
    job.process.send_signal(signal.SIGINT)
    assert sorted(job.lines(2)) == ["[0]<stdout>:no\n", "[1]<stdout>:no\n"]
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.finish()
    assert code == 130
    assert ends(err) == dict.fromkeys(range(2), KILLED)


# The moment to wait for, and whether the launcher reports at that time how it was ended.
MOMENTS = {
    "its interpreter starts": (lambda job: None, False),
    "it starts the agent": (lambda job: job.said("rendezvous on"), True),
    "the agent starts": (lambda job: until(job.agent), True),
    "the first rank starts": (lambda job: until(lambda: len(job.processes()) > 3), True),
    "the ranks have been started": (lambda job: job.said("rank 0 is pid"), True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_signal_during_the_start(run, moment):
    job = run("-np", 4, "--verbose", *python(SPIN))
    wait, listens = MOMENTS[moment]
    wait(job)
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.finish()
    if listens or code != -signal.SIGTERM:
        assert code == 143
        assert last_line(err) == "horovodrun: terminated; all ranks were ended"


# ---- leftover processes ----------------------------------------------------------------------------------------------

# A shell that does not exec its last command, with a grandchild in the background and a daemon, whose parent has ended
# and which has its own session.
GRANDCHILD = f'{sys.executable} -c "import signal; signal.pause()"'
TREE = ["sh", "-c", f"{GRANDCHILD} & (setsid sleep {NEVER} &) ; echo ready; sleep {NEVER}; true"]


def start_tree(run, size=2):
    job = run("-np", size, *TREE)
    job.lines(size)
    # Launcher, guard and agent, and for each rank the shell, two sleeps and Python.
    until(lambda: len(job.processes()) >= 3 + 4 * size)
    return job


def test_ranks_end_when_the_launcher_is_killed(run):
    job = start_tree(run)
    job.process.kill()
    job.wait_gone()


def test_ranks_end_when_the_agent_is_killed(run):
    job = start_tree(run)
    job.agent().kill()
    code, _, err = job.finish()
    assert code == 1
    assert last_line(err) == (
        "horovodrun: the agent on this host was killed by signal 9 (SIGKILL); all ranks were ended"
    )
    assert not job.processes()


@pytest.mark.parametrize(
    "names",
    list(itertools.permutations(["launcher", "guard", "agent"], 2)),
    ids="+".join,
)
def test_nothing_is_left_when_two_processes_are_killed_together(run, names):
    """Neither notices the death of the other: both are stopped when they are killed, one after the other."""
    job = start_tree(run)
    found = {
        "launcher": psutil.Process(job.process.pid),
        "guard": job.guard(),
        "agent": job.agent(),
    }
    for name in names:
        found[name].suspend()
    for name in names:
        until(lambda name=name: found[name].status() == psutil.STATUS_STOPPED)
    for name in names:
        found[name].kill()
    job.wait_gone()


def test_ranks_end_when_the_guard_is_killed(run):
    job = start_tree(run)
    job.guard().kill()
    code, _, err = job.finish()
    assert code == 143
    assert "was killed by signal 15 (SIGTERM)" in last_line(err)
    assert not job.processes()


@pytest.mark.parametrize("which", ["guard", "agent"])
def test_ranks_end_when_the_agent_is_terminated(run, which):
    job = start_tree(run)
    getattr(job, which)().terminate()
    code, _, err = job.finish()
    assert code == 143
    assert "was killed by signal 15 (SIGTERM)" in last_line(err)
    assert not job.processes()


def test_children_of_a_killed_rank_are_ended(run):
    job = start_tree(run)
    shells = [p for p in job.processes() if p.cmdline()[:2] == ["sh", "-c"]]
    shells[0].kill()
    code, _, err = job.finish()
    assert code == 137
    assert re.search(r"rank \d was killed by signal 9", last_line(err))
    assert not job.processes()


def test_interrupt_ends_grandchildren(run):
    job = start_tree(run)
    job.process.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130
    assert not job.processes()


def test_processes_left_by_a_successful_job_are_ended(run):
    """A daemon with its own session and an open output neither delays the launcher's exit nor outlives it."""
    job = run("-np", 2, "sh", "-c", f"setsid sleep {NEVER} & echo ready")
    code, out, err = job.finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0]<stdout>:ready", "[1]<stdout>:ready"]
    assert not job.processes()


def is_stuck(process):
    """Whether a process that writes continuously sleeps because the pipe at its stdout is full."""
    pipe = os.open(f"/proc/{process.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    try:
        full = not select.select([], [pipe], [], 0)[1]
    finally:
        os.close(pipe)
    return full and process.status() == psutil.STATUS_SLEEPING


def test_ranks_end_when_a_launcher_with_blocked_output_is_killed(run):
    """The ranks are blocked on full pipes, as is the launcher's own output."""
    job = run("-np", 2, "yes")
    until(lambda: len(job.processes()) == 5, 40)
    ranks = [process for process in job.processes() if process.cmdline() == ["yes"]]
    until(lambda: all(map(is_stuck, [*ranks, psutil.Process(job.process.pid)])), 40)
    job.process.kill()
    job.wait_gone()


def test_output_of_ending_ranks_is_complete(run):
    """The output is complete even if a rank ended before the agent has read any of it."""
    count = 30000
    command = python(
        "import fcntl",
        "fcntl.fcntl(1, 1031, 1 << 20)",  # F_SETPIPE_SZ
        "os.kill(os.getppid(), signal.SIGSTOP)",
        f"os.write(1, b''.join(b'%d\\n' % i for i in range({count})))",
        "os._exit(0)",
    )
    job = run("-np", 1, *command)
    agent = until(job.agent)
    until(lambda: [child.status() for child in agent.children()] == [psutil.STATUS_ZOMBIE])
    agent.resume()
    code, out, _ = job.finish()
    assert code == 0
    assert out.splitlines() == [f"[0]<stdout>:{i}" for i in range(count)]


# ---- on another host -------------------------------------------------------------------------------------------------


def test_agent_without_a_launcher_ends():
    """The launcher's host may vanish between the login and the first command, while sshd keeps the connection open."""
    source = agent_source().decode()
    first = "_FIRST_SILENCE_SECONDS = 60.0"
    assert first in source
    hurried = source.replace(first, "_FIRST_SILENCE_SECONDS = 0.2")
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", hurried],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.wait(scaled(40)) == 0
        finally:
            process.kill()
        assert process.stdout.read() == agent_module.GREETING


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (agent_module.GREETING + agent_module.FRAME.pack(b"1", 2, 0), "sent an invalid frame"),
        (
            agent_module.GREETING + agent_module.FRAME.pack(b"1", 0, MAX_FRAME + 1),
            "sent an invalid frame",
        ),
        (b"Welcome! " * (1 << 17), "prints too much"),
    ],
    ids=["rank of another host", "length", "noise"],
)
def test_invalid_agent_messages_are_refused(tmp_path, said, why):
    (tmp_path / "said").write_bytes(said)
    ssh = Ssh(("sh", "-c", f"cat {tmp_path}/said; exec cat >/dev/null"))
    connection = AgentConnection(
        Placement("elsewhere", is_local=False, ranks=(0, 1)), SshStarter(ssh, 5.0)
    )
    connection.start()

    def listen():
        while select.select([connection.link.stdout], [], [], 40)[0]:
            assert not list(connection.receive())

    try:
        with pytest.raises(LostError, match=why):
            listen()
    finally:
        connection.end(20.0)


# ---- blame -----------------------------------------------------------------------------------------------------------


def test_rank_that_left_after_the_cause_is_not_blamed():
    """Rank 0 leaves first, and ranks 1, 2 and 3 as a consequence, of which rank 3 is the first to end."""
    blame = Blame(range(4))
    departures = [0, 1, 2, 3]
    blame.ended(3, 1, departures, 10.0)
    assert (blame.first, blame.due) == (3, 10.0 + CAUSE_SECONDS)
    blame.ended(1, 1, departures, 10.1)
    assert (blame.first, blame.due) == (1, 10.0 + CAUSE_SECONDS)
    blame.ended(2, 2, departures, 10.2)  # rank 2 left after rank 1
    assert (blame.first, blame.due) == (1, 10.0 + CAUSE_SECONDS)
    blame.ended(0, 7, departures, 10.3)
    assert (blame.first, blame.code, blame.due) == (0, 7, 10.3)
