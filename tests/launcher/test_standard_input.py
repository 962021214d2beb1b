"""What ranks read from their standard input: rank 0 what the launcher reads, or every rank a program."""

import hashlib
import os
import pty
import select
import signal
import subprocess
import sys

import pytest

from horoplug.runner.checks import reads_program
from tests.harness import ROOT
from tests.harness.limits import scaled
from tests.harness.netns import Cluster
from tests.harness.support import process_state, until

ENV = os.environ | {"PYTHONPATH": str(ROOT)}
RUN = [sys.executable, "-m", "horoplug.runner"]


def launch(*arguments, timeout=120, **options):
    return subprocess.run(
        [*RUN, *map(str, arguments)],
        env=ENV,
        capture_output=True,
        timeout=scaled(timeout),
        **options,
    )


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("python", "python"),
        ("python3.12 -u - --flag", "python3.12"),
        ("/usr/bin/python3 -W ignore -X dev", "python3"),
        ("env A=1 nice -n 5 python -", "python"),
        ("bash -s -- a b", "bash"),
        ("sh -x", "sh"),
        ("bash --norc -o pipefail", "bash"),
        ("dash -", "dash"),
        ("python train.py -", None),
        ("python -c code", None),
        ("python -m module -", None),
        ("python --version", None),
        ("python -V", None),
        ("bash script -s", None),
        ("bash -ec true", None),
        ("bash -o errexit script", None),
        ("env A=1 python train.py", None),
        ("./program python -", None),
        ("cat -", None),
    ],
)
def test_commands_that_read_their_program(command, found):
    assert reads_program(command.split()) == found


@pytest.mark.parametrize(
    "flags", [["-np", 3], ["-np", 3, "--min-np", 3]], ids=["static", "elastic"]
)
def test_every_rank_gets_the_program(flags):
    program = "import os, sys\nprint(os.environ['HOROVOD_RANK'], sys.argv[1:])\n" + 100_000 * "#\n"
    done = launch(*flags, sys.executable, "-", "a", input=program.encode())
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(done.stdout.decode().splitlines()) == [
        f"[{rank}]<stdout>:{rank} ['a']" for rank in range(3)
    ]


@pytest.mark.short
def test_first_rank_gets_data_and_the_others_none():
    data = os.urandom(3 << 20)
    done = launch("-np", 2, "bash", "-c", "echo $HOROVOD_RANK $(sha256sum)", input=data)
    digests = [hashlib.sha256(each).hexdigest() for each in (data, b"")]
    assert sorted(done.stdout.decode().splitlines()) == [
        f"[{rank}]<stdout>:{rank} {digest} -" for rank, digest in enumerate(digests)
    ]


def test_rank_on_another_host_gets_the_input():
    """Rank 0 is on another host, where it also has all cores; the other two share this one's."""
    data = os.urandom(1 << 20)
    say = "echo $HOROVOD_RANK ${OMP_NUM_THREADS-all} $(sha256sum | cut -c-64)"
    with Cluster(2) as cluster:
        command = [*cluster.inside(0), *RUN, "-np", "3", "-H", "h1:1,h0:2", "bash", "-c", say]
        env = {name: value for name, value in ENV.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            command,
            env=env | {"HOROPLUG_SSH": cluster.ssh},
            input=data,
            capture_output=True,
            timeout=scaled(120),
        )
    assert done.returncode == 0, done.stderr
    full, empty = (hashlib.sha256(each).hexdigest() for each in (data, b""))
    share = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert sorted(done.stdout.decode().splitlines()) == [
        f"[0]<stdout>:0 all {full}",
        f"[1]<stdout>:1 {share} {empty}",
        f"[2]<stdout>:2 {share} {empty}",
    ]


def test_no_more_is_read_than_a_rank_takes(tmp_path):
    """Rank 0 reads nothing, and closes its input later. What a program writes to the launcher waits in the pipe."""
    go = tmp_path / "go"
    script = f"until [ -e {go} ]; do sleep 0.05; done; exec <&-; echo closed; until [ -e {go}2 ]; do sleep 0.05; done"
    process = subprocess.Popen(
        [*RUN, "-np", "1", "bash", "-c", script],
        env=ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    written, most = 0, 8 << 20
    os.set_blocking(process.stdin.fileno(), False)
    try:
        # The launcher starts, and reads beyond the pipe. Two seconds without room: it does not read any more.
        while written < most:
            seconds = 2 if written > 1 << 17 else 60
            if not select.select([], [process.stdin], [], seconds)[1]:
                break
            written += os.write(process.stdin.fileno(), bytes(1 << 16))
        go.write_text("")
        assert b"closed" in process.stdout.readline()
        assert 1 << 17 < written < 1 << 20
        (tmp_path / "go2").write_text("")
        assert process.wait(scaled(60)) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize("redirected", ["<&-", "</dev/null"])
def test_jobs_run_without_input(redirected):
    shell = f"exec {redirected}; exec {sys.executable} -m horoplug.runner -np 2 cat"
    done = subprocess.run(["bash", "-c", shell], env=ENV, capture_output=True, timeout=scaled(60))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("flags", "program", "says"),
    [
        (["-np", 2], "python3", "python3 has nothing to run"),
        (["-np", 2, "--mpi"], "python3", "mpirun gives standard input to rank 0 only"),
    ],
)
def test_program_that_cannot_be_given_is_one_line(flags, program, says):
    done = launch(*flags, program, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(f"horovodrun: {says}")


# ---- terminals -------------------------------------------------------------------------------------------------------


def in_terminal(script):
    """Run a shell with job control as the leader of a terminal's session. Returns its pid and the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.execvpe("bash", ["bash", "--norc", "-c", f"set -m; {script}"], ENV)
        finally:
            os._exit(127)
    return pid, terminal


def read_until(terminal, text):
    """Read from a terminal until a text, or the end, is there."""
    found = ""

    def read():
        nonlocal found
        try:
            found += os.read(terminal, 1 << 16).decode()
        except OSError:  # the session has ended
            return True
        return text in found

    until(read, 120)
    assert text in found
    return found


def end(pid, terminal):
    os.close(terminal)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_job_in_the_background_of_a_terminal_is_not_stopped(tmp_path):
    """It would be, if it read from the terminal. Its input begins when it comes to the foreground."""
    go = tmp_path / "go"
    rank = "'echo up; [ $HOROVOD_RANK = 1 ] || head -1'"
    run = " ".join([*RUN, "--no-status", "-np", "2", "bash", "-c", rank])
    wait = f"until [ -e {go} ]; do sleep 0.05; done"
    pid, terminal = in_terminal(
        f"{run} & echo pid $!.; {wait}; read line; echo shell $line; fg; echo rc $?"
    )
    try:
        said = read_until(terminal, "[0]<stdout>:up")
        launcher = int(said.partition("pid ")[2].partition(".")[0])
        os.write(terminal, b"first\n")
        for _ in range(20):  # two seconds in which the line can be read
            assert process_state(launcher) != "T"
            select.select([], [], [], 0.1)
        go.write_text("")
        read_until(terminal, "shell first")
        os.write(terminal, b"second\n")
        said = read_until(terminal, "rc 0")
        assert "[0]<stdout>:second" in said
    finally:
        end(pid, terminal)


def test_program_is_not_read_from_a_terminal():
    pid, terminal = in_terminal(f"{' '.join(RUN)} -np 2 python3; echo code $?")
    try:
        said = read_until(terminal, "code")
        assert "python3 reads its program from standard input, which is a terminal" in said
        assert "code 2" in said
    finally:
        end(pid, terminal)
