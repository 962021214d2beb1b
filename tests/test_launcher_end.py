"""How a job ends: which failure is reported, with which exit code, and that no process is left, whoever is killed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from horoplug.runner import agent as agent_module
from horoplug.runner.job import describe

ROOT = Path(__file__).resolve().parent.parent
MARK = "HOROPLUG_TEST_JOB"  # a variable that every process of a job inherits
SPIN = "import time\nwhile True: time.sleep(60)"


class Run:
    """A launcher under test, and all processes that stem from it."""

    def __init__(self, *arguments, env=None):
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "horoplug.runner", *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(ROOT), MARK: self.mark} | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def lines(self, count):
        """The next lines on stdout."""
        return [self.process.stdout.readline() for _ in range(count)]

    def finish(self, timeout=40):
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

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

    def agent(self):
        (found,) = [p for p in self.processes() if p.cmdline()[-1].endswith("agent.py")]
        return found

    def wait_gone(self, timeout=15):
        deadline = time.monotonic() + timeout
        while left := self.processes():
            assert time.monotonic() < deadline, [p.cmdline() for p in left]
            time.sleep(0.02)

    def clean_up(self):
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.communicate()


@pytest.fixture
def run():
    """Starts launchers; none of their processes may be left at the end."""
    started = []

    def start(*arguments, **options):
        started.append(Run(*arguments, **options))
        return started[-1]

    yield start
    left = [process for one in started for process in one.processes()]
    for one in started:
        one.clean_up()
    assert not left, left


def python(*lines):
    head = "import os, signal, sys, time; rank = int(os.environ['HOROVOD_RANK'])"
    return [sys.executable, "-c", "\n".join((head, *lines))]


def last_line(err):
    return err.splitlines()[-1]


# ---- exit codes and causes -------------------------------------------------------------------------------------------


def test_all_good(run):
    code, out, err = run("-np", 3, *python("print(rank)")).finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{r}]<stdout>:{r}" for r in range(3)]


def test_the_first_exit_code(run):
    start = time.monotonic()
    command = python("if rank == 1: sys.exit(7)", SPIN)
    code, _, err = run("-np", 3, *command).finish()
    assert code == 7
    assert last_line(err) == "horovodrun: rank 1 exited with code 7; the other ranks were ended"
    assert time.monotonic() - start < agent_module._KILL_SECONDS


def test_a_single_rank_that_fails(run):
    code, _, err = run("-np", 1, "sh", "-c", "exit 3").finish()
    assert (code, err) == (3, "horovodrun: rank 0 exited with code 3\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_the_first_signal(run, number):
    command = python(f"if rank == 1: os.kill(os.getpid(), {int(number)})", SPIN)
    code, _, err = run("-np", 3, *command).finish()
    assert code == 128 + number
    assert last_line(err) == (
        f"horovodrun: rank 1 was killed by signal {int(number)} ({number.name}); "
        "the other ranks were ended"
    )


def test_the_killed_rank_is_the_cause_not_those_that_follow(run, tmp_path):
    """Ranks 0 and 2 exit with 1 because rank 1 has gone, as soon as they can."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = python(
        "path = sys.argv[1]",
        "if rank == 1:",
        "    pipe = open(path, 'w')",
        "    print('ready')",
        "    time.sleep(60)",
        "open(path).read()",  # until rank 1 is dead
        "sys.exit(1)",
    )
    job = run("-np", 3, "--verbose", *command, fifo)
    assert job.lines(1) == ["[1]<stdout>:ready\n"]
    pid = next(
        int(match.group(1))
        for line in iter(job.process.stderr.readline, "")
        if (match := re.search(r"rank 1 is pid (\d+)", line))
    )
    os.kill(pid, signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 137
    assert "rank 1 was killed by signal 9 (SIGKILL)" in last_line(err)


def test_the_rank_that_left_first_is_the_cause(run):
    """Rank 1 fails and tells the others, who are faster to end than its interpreter is."""
    command = python(
        "from horoplug.common.config import Config",
        "from horoplug.rendezvous.session import Rendezvous",
        "rendezvous = Rendezvous(Config.from_env())",
        "mesh = rendezvous.mesh(0)",
        "if rank == 1:",
        "    rendezvous.close()",
        "    for peer in mesh.peers: os.close(peer[2])",
        "    time.sleep(0.3)",  # teardown
        "    os._exit(9)",
        "import select",
        "stream = dict((p[0], p[2]) for p in mesh.peers)[1]",
        "select.select([stream], [], [])",
        "os._exit(1)",
    )
    code, _, err = run("-np", 5, *command).finish()
    assert code == 9
    assert "rank 1 exited with code 9" in last_line(err)


def test_of_ends_at_the_same_moment_a_crash_is_the_cause():
    codes = [0, 1, 1, -signal.SIGTERM, 128 + signal.SIGKILL, -signal.SIGSEGV]
    order = sorted(codes, key=agent_module.severity)
    assert order[:2] == [-signal.SIGSEGV, 128 + signal.SIGKILL]
    assert order[-1] == 0


def test_describe():
    assert describe(0) == "exited with code 0"
    assert describe(-9) == "was killed by signal 9 (SIGKILL)"
    assert describe(-40) == "was killed by signal 40"


def test_who_ignores_sigterm_is_killed(run):
    command = python(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "print('deaf')",
        "if rank == 1:",
        "    time.sleep(0.5)",
        "    sys.exit(4)",
        SPIN,
    )
    start = time.monotonic()
    code, _, err = run("-np", 2, *command).finish()
    assert code == 4
    assert 4.5 < time.monotonic() - start < 15
    assert "rank 1 exited with code 4" in last_line(err)


def test_ranks_may_clean_up_and_are_still_heard(run):
    command = python(
        "def tidy(*_):",
        "    print('tidied up', end='')",
        "    sys.exit(0)",
        "signal.signal(signal.SIGTERM, tidy)",
        "print('ready')",
        "if rank == 1:",
        "    time.sleep(0.5)",
        "    sys.exit(4)",
        SPIN,
    )
    code, out, _ = run("-np", 2, *command).finish()
    assert code == 4
    assert "[0]<stdout>:tidied up\n" in out


def test_a_rank_that_never_initialises_fails_the_others_at_once(run):
    """Rank 1 ends with 0 before it has met the others: they do not wait for the start timeout."""
    command = python(
        "if rank == 1: sys.exit(0)",
        "from horoplug.common.config import Config",
        "from horoplug.rendezvous.session import Rendezvous",
        "Rendezvous(Config.from_env()).mesh(0)",
    )
    start = time.monotonic()
    code, _, err = run("-np", 2, *command).finish()
    assert code == 1
    assert time.monotonic() - start < 15
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
def test_a_signal_ends_all(run, number, word):
    job = run("-np", 3, *python("print('ready')", SPIN))
    job.lines(3)
    job.process.send_signal(number)
    start = time.monotonic()
    code, _, err = job.finish()
    assert code == 128 + number
    assert err == f"horovodrun: {word}; all ranks were ended\n"
    assert time.monotonic() - start < 4


def test_a_second_interrupt_kills(run):
    job = run(
        "-np",
        2,
        *python("signal.signal(signal.SIGTERM, lambda *_: print('no'))", "print('ready')", SPIN),
    )
    job.lines(2)
    job.process.send_signal(signal.SIGINT)
    assert sorted(job.lines(2)) == ["[0]<stdout>:no\n", "[1]<stdout>:no\n"]
    start = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130
    assert time.monotonic() - start < 3


def test_a_signal_during_the_start(run):
    job = run("-np", 2, *python(SPIN))
    while not job.processes():
        time.sleep(0.001)
    time.sleep(0.15)  # somewhere between the interpreter's start and the ranks'
    job.process.send_signal(signal.SIGTERM)
    assert job.finish()[0] in (143, -signal.SIGTERM)


# ---- nothing is left -------------------------------------------------------------------------------------------------

# A shell that is not replaced by its last command, with a grandchild in the background, and a daemon: its parent has
# ended and it has a session of its own.
GRANDCHILD = f'{sys.executable} -c "import time; time.sleep(600)"'
TREE = ["sh", "-c", f"{GRANDCHILD} & (setsid sleep 600 &) ; echo ready; sleep 600; true"]


def start_tree(run, size=2):
    job = run("-np", size, *TREE)
    job.lines(size)
    deadline = time.monotonic() + 20
    # Launcher and agent, and of each rank the shell, two sleeps and Python.
    while len(job.processes()) < 2 + 4 * size:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return job


def test_the_launcher_is_killed(run):
    job = start_tree(run)
    job.process.kill()
    job.wait_gone()


def test_the_agent_is_killed(run):
    job = start_tree(run)
    job.agent().kill()
    code, _, err = job.finish()
    assert code == 1
    assert last_line(err) == (
        "horovodrun: the agent on this host was killed by signal 9 (SIGKILL); all ranks were ended"
    )
    job.wait_gone(1)


def test_the_agent_is_terminated(run):
    job = start_tree(run)
    job.agent().terminate()
    code, _, err = job.finish()
    assert code == 143
    assert "was killed by signal 15 (SIGTERM)" in last_line(err)
    job.wait_gone(1)


def test_a_rank_is_killed_whose_children_live_on(run):
    job = start_tree(run)
    shells = [p for p in job.processes() if p.cmdline()[:2] == ["sh", "-c"]]
    shells[0].kill()
    code, _, err = job.finish()
    assert code == 137
    assert re.search(r"rank \d was killed by signal 9", last_line(err))
    job.wait_gone(1)


def test_interrupting_ends_grandchildren(run):
    job = start_tree(run)
    job.process.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130
    job.wait_gone(1)


def test_what_a_good_job_leaves_behind_is_ended(run):
    """A daemon with its own session, its output still open, does not keep the launcher, nor outlive it."""
    start = time.monotonic()
    job = run("-np", 2, "sh", "-c", "setsid sleep 600 & echo ready")
    code, out, err = job.finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0]<stdout>:ready", "[1]<stdout>:ready"]
    assert time.monotonic() - start < 10
    job.wait_gone(1)


def test_the_launcher_is_killed_while_nobody_reads_its_output(run):
    """The ranks, the agent and the launcher are all stuck on full pipes."""
    job = run("-np", 2, "yes")
    deadline = time.monotonic() + 20
    while len(job.processes()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)  # fill up
    job.process.kill()
    job.wait_gone()


def test_output_is_complete(run):
    """Also when a rank has ended before the agent has had time to read any of it."""
    count = 30000
    command = python(
        "import fcntl",
        "fcntl.fcntl(1, 1031, 1 << 20)",  # F_SETPIPE_SZ
        "os.kill(os.getppid(), signal.SIGSTOP)",
        f"os.write(1, b''.join(b'%d\\n' % i for i in range({count})))",
        "os._exit(0)",
    )
    job = run("-np", 1, *command)
    deadline = time.monotonic() + 20
    while not (agents := [p for p in job.processes() if p.cmdline()[-1].endswith("agent.py")]):
        assert time.monotonic() < deadline
    (agent,) = agents

    def rank_has_ended():
        states = [child.status() for child in agent.children()]
        return states == [psutil.STATUS_ZOMBIE]

    while not rank_has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    agent.resume()
    code, out, _ = job.finish()
    assert code == 0
    assert out.splitlines() == [f"[0]<stdout>:{i}" for i in range(count)]
