"""Output that cannot be written: full disks, readers that are slow, gone or never read. Each job is a real process."""

import contextlib
import fcntl
import os
import resource
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.harness.limits import scaled
from tests.harness.support import environment, process_memory, process_state, until

# A reader that accepts nothing is given up soon.
HURRIED = """
import sys
from horoplug.runner.output import console; from horoplug.runner import launch
console._STALLED_SECONDS = 0.5
sys.exit(launch.main())
"""
# A reader that accepts nothing is never given up.
PATIENT = HURRIED.replace("0.5", "600")
FULL = "/dev/full"


def command(*arguments, program=None):
    start = ["-c", program] if program else ["-m", "horoplug.runner"]
    return [sys.executable, *start, *map(str, arguments)]


def launch(*arguments, **options):
    return subprocess.run(
        command(*arguments),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=scaled(60),
        **({"stdout": subprocess.PIPE} | options),
    )


def python(*lines):
    head = "import os, sys, time; rank = int(os.environ['HOROVOD_RANK'])"
    return [sys.executable, "-c", "\n".join((head, *lines))]


@contextlib.contextmanager
def on_a_pipe(*arguments, program=None, nonblocking=False):
    """A launcher whose stdout is a pipe that nobody reads yet. Yields it and the pipe's reading end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, not nonblocking)
    run = subprocess.Popen(
        command(*arguments, program=program),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    try:
        yield run, reader
    finally:
        os.close(reader)
        run.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(scaled(30))
        run.kill()
        run.communicate()


def size_of(pipe):
    """The number of bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))[0]


def is_full(pipe):
    """Whether a write would block. (A pipe is full when its pages are in use, with any number of bytes in them.)"""
    writer = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        return not select.select([], [writer], [], 0)[1]
    finally:
        os.close(writer)


def read_all(pipe, slowly=False):
    data = b""
    while piece := os.read(pipe, 1 << 16):
        data += piece
        if slowly and len(data) < 1 << 18:
            time.sleep(0.005)  # not for synchronisation: the writer is to find the pipe full
    return data


# ---- full disks ------------------------------------------------------------------------------------------------------


def test_full_disk_ends_a_log_and_not_the_job(tmp_path):
    """The ranks' other logs, and the launcher's own output, are complete. Here the logs of ranks 0 and 2 are larger
    than a file may be."""
    lines = python(
        "for i in range(3): print('line', i, end='.' * 20 * (rank != 1) + '\\n')",
        "sys.stderr.write('over\\n')",
    )
    done = launch(
        *("-np", 3, "--output-filename", tmp_path, *lines),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (25, 25)),
    )
    assert done.returncode == 0
    everything = sorted(
        f"[{r}]<stdout>:line {i}{'.' * 20 * (r != 1)}" for r in range(3) for i in range(3)
    )
    assert sorted(done.stdout.decode().splitlines()) == everything
    ours = [line for line in done.stderr.decode().splitlines() if line.startswith("horovodrun")]
    assert len(ours) == 2, ours
    assert ours[0] in [
        f"horovodrun: {tmp_path}/rank.{rank}/stdout: File too large; this log ends here"
        for rank in (0, 2)
    ]
    assert ours[1] == "horovodrun: 2 logs of ranks are incomplete"
    assert (tmp_path / "rank.1" / "stdout").read_text() == "line 0\nline 1\nline 2\n"
    assert (tmp_path / "rank.0" / "stderr").read_text() == "over\n"


def test_log_ends_where_the_disk_is_full(tmp_path):
    """The last write is a short one: what fits is in the file, once."""
    limit, text = 10_000, "".join(f"{i:07d}\n" for i in range(4000))
    (tmp_path / "text").write_text(text)
    done = launch(
        *("-np", 1, "--output-filename", tmp_path / "logs", "cat", tmp_path / "text"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 0
    path = tmp_path / "logs" / "rank.0" / "stdout"
    assert done.stderr.decode() == f"horovodrun: {path}: File too large; this log ends here\n"
    assert path.read_text() == text[:limit]
    assert done.stdout.decode().replace("[0]<stdout>:", "") == text


def test_full_disk_under_stdout_does_not_end_the_job(tmp_path):
    lines = python(
        "for i in range(3): print('line', i); time.sleep(0.05)",
        f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').close()",
        "sys.stderr.write('over\\n')",
    )
    with open(FULL, "wb") as full:
        done = launch("-np", 2, *lines, stdout=full)
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    said = done.stderr.decode().splitlines()
    assert sorted(said) == [
        "[0]<stderr>:over",
        "[1]<stderr>:over",
        "horovodrun: stdout: No space left on device; nothing more is written there",
    ]


def test_full_disk_under_stdout_and_stderr_leaves_the_exit_code():
    with open(FULL, "wb") as full:
        done = subprocess.run(
            command("-np", 1, *python("print('x')", "sys.exit(7)")),
            env=environment(),
            stdout=full,
            stderr=full,
            timeout=scaled(60),
        )
    assert done.returncode == 7


# ---- readers that are slow or do not read ----------------------------------------------------------------------------

COUNT = 60_000
NUMBERS = python(f"for i in range({COUNT}): print(f'{{rank}} {{i:06d}}', 'x' * 30)")


@pytest.mark.parametrize("nonblocking", [False, True], ids=["blocking", "nonblocking"])
def test_slow_reader_loses_nothing(nonblocking):
    """More output than the launcher keeps, on a pipe that is full for a while: writes are short or fail with EAGAIN."""
    with on_a_pipe("-np", 2, *NUMBERS, nonblocking=nonblocking) as (run, pipe):
        until(lambda: is_full(pipe), 40)
        data = read_all(pipe, slowly=True)
        _, err = run.communicate(timeout=scaled(40))
        assert (run.returncode, err) == (0, b"")
    for rank in range(2):
        prefix = f"[{rank}]<stdout>:"
        lines = [line for line in data.decode().splitlines() if line.startswith(prefix)]
        expected = [f"{prefix}{rank} {i:06d} {'x' * 30}" for i in range(COUNT)]
        assert lines == expected


def test_ranks_wait_for_a_slow_reader_instead_of_filling_the_launchers_memory(tmp_path):
    total = 64_000_000
    pid_file = tmp_path / "pid"
    lines = python(
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))",
        f"for i in range({total // 1000}): print('x' * 999)",
    )
    with on_a_pipe("-np", 1, *lines) as (run, pipe):
        until(lambda: is_full(pipe), 40)
        rank, before = int(pid_file.read_text()), process_memory(run.pid, "VmHWM")
        received = 0
        while received < total // 2:  # the pipe is read only while the rank waits
            # A rank that only writes sleeps when its pipe is full.
            until(
                lambda: (
                    process_state(rank) == "S"
                    or process_memory(run.pid, "VmHWM") > before + total // 2
                )
            )
            assert process_memory(run.pid, "VmHWM") < before + total // 4, (
                "the launcher keeps what nobody reads"
            )
            received += len(os.read(pipe, 1 << 16))


def test_output_of_a_failed_job_waits_for_a_slow_reader():
    text = "".join(f"{i:07d}\n" for i in range(40_000))
    lines = python(f"for i in range({40_000}): print(f'{{i:07d}}')", "sys.exit(3)")
    with on_a_pipe("-np", 1, *lines) as (run, pipe):
        line = run.stderr.readline()  # the ranks have ended
        assert line == b"horovodrun: rank 0 exited with code 3\n"
        assert read_all(pipe, slowly=True).decode().replace("[0]<stdout>:", "") == text
        assert run.wait(scaled(40)) == 3


def test_launcher_with_a_blocked_terminal_acts_on_dead_ranks(tmp_path):
    gate = tmp_path / "gate"
    lines = python(
        "if rank == 0:",
        "    while True: print('x' * 1000)",
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)",
        "sys.exit(5)",
    )
    with on_a_pipe("-np", 2, *lines, program=HURRIED) as (run, pipe):
        until(lambda: is_full(pipe), 40)
        gate.touch()
        assert select.select([run.stderr], [], [], 40)[0]
        said = run.stderr.readline()
        assert said == b"horovodrun: rank 1 exited with code 5; the other ranks were ended\n"
        _, err = run.communicate(timeout=scaled(40))
        assert run.returncode == 5
        assert err.endswith(b" bytes of output were not accepted and are lost\n"), err
        assert is_full(pipe)


def test_interrupt_ends_the_wait_for_a_reader(tmp_path):
    lines = python("for i in range(100): print('x' * 10_000)", "sys.exit(3)")
    with on_a_pipe("-np", 1, *lines, program=PATIENT) as (run, pipe):
        assert run.stderr.readline() == b"horovodrun: rank 0 exited with code 3\n"
        run.terminate()
        assert run.wait(scaled(40)) == 3
        assert size_of(pipe) > 0
