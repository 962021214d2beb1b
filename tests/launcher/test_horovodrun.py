"""horovodrun on one host: valid and invalid command lines, the environment of the ranks, and their output."""

import base64
import os
import re
import select
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from horoplug.runner import checks
from horoplug.runner.command.arguments import parse
from horoplug.runner.output import output
from tests.harness import ROOT
from tests.harness.limits import scaled
from tests.harness.screen import Screen

ENV = os.environ | {"PYTHONPATH": str(ROOT)}


def launch(*arguments, env=None, cwd=None, timeout=60):
    return subprocess.run(
        [sys.executable, "-m", "horoplug.runner", *map(str, arguments)],
        env=ENV | (env or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=scaled(timeout),
        stdin=subprocess.DEVNULL,
    )


def python(*lines):
    return [sys.executable, "-c", "\n".join(("import os, sys, time", *lines))]


# ---- invalid command lines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-np 0 true", "at least 1 is wanted, not 0"),
        ("-np -2 true", "at least 1 is wanted, not -2"),
        ("-np two true", "a whole number is wanted, not 'two'"),
        ("-np 1.5 true", "a whole number is wanted, not '1.5'"),
        ("-np", "expected one argument"),
        ("true", "how many processes"),
        ("-np 2", "there is no command to run"),
        ("-np 2 --", "there is no command to run"),
        ("-np 2 --nonesuch true", "unrecognized arguments: --nonesuch"),
        ("-np 2 --verb true", "unrecognized arguments: --verb"),
        ("-np 2 --timeline-filename", "--timeline-filename: expected one argument"),
        ("-np 2 --timeline-mark-cycles --no-timeline-mark-cycles true", "not allowed with"),
        ("-np 2 no-such-program", "there is no program 'no-such-program'"),
        (
            "-np 2 FOO=1 python x.py",
            "FOO=1 is not a program: put variables before horovodrun, or write env FOO=1 python",
        ),
        ("-np 2 ./no-such-program", "there is no program './no-such-program'"),
        ("-np 2 python no-such.py --flag", "there is no script 'no-such.py'"),
        ("-np 2 python3 -u -W ignore no-such.py", "there is no script 'no-such.py'"),
        ("-np 4 -H localhost:2 true", "-np 4 is more than localhost:2 has: 2 slots"),
        ("-np 4 -H localhost:2,127.0.0.1:1 true", "has: 3 slots"),
        ("-np 2 -H localhost true", "-np 2 is more than localhost:1 has: 1 slot"),
        ("-np 2 -H -oProxyCommand=x:2 true", "expected one argument"),
        ("-np 2 --hosts=-oProxyCommand=x:2 true", "-H wants host:slots"),
        ("-np 2 -hostfile /nonesuch true", "/nonesuch cannot be read: No such file"),
        ("-np 2 -H localhost:2 -hostfile /nonesuch true", "not allowed with"),
        ("-np 2 --network-interface nonesuch0 true", "there is no network interface nonesuch0"),
        ("-np 2 --ssh ' true", "--ssh"),
        ("-np 2 -H localhost:0 true", "-H wants host:slots"),
        ("-np 2 -H : true", "-H wants host:slots"),
        ("-np 2 -H h1:" + 5000 * "9" + " true", "-H wants host:slots"),
        ("-np 2 -H h1;reboot:2 true", "-H wants host:slots"),
        ("-np 2 --start-timeout 0 true", "a positive number of seconds is wanted, not '0'"),
        ("-np 2 --gloo-timeout-seconds soon true", "a positive number of seconds"),
        ("-np 2 --log-level LOUD true", "invalid choice: 'LOUD'"),
        ("-np 2 --fusion-threshold-mb -1 true", "at least 0 is wanted"),
        ("-np 2 --no-stall-check --stall-check true", "not allowed with"),
        ("-np 2 --output-filename /dev/null/x true", "--output-filename: Not a directory"),
    ],
)
@pytest.mark.short(failure=True)
def test_invalid_command_lines_are_refused_in_one_line(arguments, message):
    done = launch(*arguments.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert re.fullmatch(r"horovodrun: [^\n]+\n", done.stderr)


def test_deleted_folder_is_one_error_line(tmp_path):
    folder = tmp_path / "deleted"
    folder.mkdir()
    programs = (
        "from horoplug.runner.launch import main; sys.exit(main(['-np', '2', 'true']))",
        "import horoplug; horoplug.run(print, num_proc=2)",
    )
    for program in programs:
        code = f"import os, sys; os.rmdir(os.getcwd()); {program}"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=ENV, capture_output=True, text=True
        )
        assert done.returncode != 0
        last = done.stderr.splitlines()[-1]
        assert last.endswith("the current folder does not exist any more: change to another one")
        folder.mkdir()


def test_unavailable_encryption_is_one_error_line():
    done = launch("-np", 2, "--encrypt", "true", env={"HOROPLUG_LIBCRYPTO": "/nonexistent"})
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"horovodrun: HOROPLUG_ENCRYPT=1 needs OpenSSL's libcrypto, [^\n]+\n", done.stderr
    )


def test_program_that_is_not_executable_is_refused(tmp_path):
    (tmp_path / "train.py").write_text("")
    done = launch("-np", 1, "./train.py", cwd=tmp_path)
    assert done.stderr == (
        "horovodrun: ./train.py is not executable (chmod +x, or python ./train.py)\n"
    )
    done = launch("-np", 1, "train.py", cwd=tmp_path)
    assert done.stderr == "horovodrun: train.py is not a program; did you mean python train.py?\n"
    (tmp_path / "broken").write_text("no shebang, no ELF: \0\1\2")
    (tmp_path / "broken").chmod(0o755)
    done = launch("-np", 2, "./broken", cwd=tmp_path)
    assert done.returncode == 126
    assert done.stderr.startswith("horovodrun: rank 0 could not be started: Exec format error")


def test_python_script_is_run_with_python():
    def script(text):
        return checks.python_script(text.split())

    assert script("train.py -m x") == "train.py"
    assert script("-u -OO -Xdev -X dev -W ignore -- train.py") == "train.py"
    assert script("-uB train.py") == "train.py"
    assert script("--check-hash-based-pycs always train.py") == "train.py"
    for none in ("", "-", "-m train", "-c code", "-uc code", "-V", "--version"):
        assert script(none) is None


# ---- information -----------------------------------------------------------------------------------------------------


@pytest.mark.short
def test_version_and_help():
    for flag in ("-v", "--version"):
        done = launch(flag)
        assert done.returncode == 0
        assert len(done.stdout.splitlines()) == 1
    done = launch("--help")
    assert done.returncode == 0
    for flag in ("-np", "-H", "--check-build", "--output-filename", "--fusion-threshold-mb"):
        assert flag in done.stdout


@pytest.mark.short
def test_check_build_imports_no_framework(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    done = launch("--check-build", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.returncode == 0, done.stderr
    assert "[X] PyTorch" in done.stdout
    headings = ["Available Frameworks:", "Available Controllers:", "Available Tensor Operations:"]
    assert [line for line in done.stdout.splitlines() if line.startswith("Available")] == headings
    assert "CPU kernels: " in done.stdout or "The core cannot be loaded: " in done.stdout


# ---- environment of the ranks ----------------------------------------------------------------------------------------


@pytest.mark.short
def test_environment_of_the_ranks():
    show = python(
        "for name in sorted(os.environ):",
        "    if 'HOROVOD' in name or 'HOROPLUG' in name or name == 'PYTHONUNBUFFERED':",
        "        print(name + '=' + os.environ[name])",
    )
    flags = [
        *("--start-timeout", 7, "--gloo-timeout-seconds", 8, "--fusion-threshold-mb", 2),
        *("--cache-capacity", 9, "--no-stall-check", "--stall-check-warning-time-seconds", 4),
        *("--stall-check-shutdown-time-seconds", 5, "--log-level", "DEBUG", "--gloo"),
        *("--autotune", "--autotune-log-file", "y.csv", "--autotune-warmup-samples", 2),
        *("--autotune-steps-per-sample", 4, "--autotune-bayes-opt-max-samples", 6),
        *("--autotune-gaussian-process-noise", 0.5),
        *("--log-without-timestamp", "--timeline-filename", "x.json", "--timeline-mark-cycles"),
    ]
    stale = {
        "HOROPLUG_RANK": "77",
        "HOROPLUG_SECRET_KEY": "stale",
        "HOROPLUG_FUSION_THRESHOLD": "1",
        "HOROPLUG_ALGORITHM": "kept",
        "HOROVOD_LOCAL_RANK": "5",
    }
    done = launch("-np", 2, "-H", "localhost:2", *flags, *show, env=stale)
    assert done.returncode == 0, done.stderr
    ranks = [{}, {}]
    for line in done.stdout.splitlines():
        rank, name, value = re.fullmatch(r"\[(\d)\]<stdout>:(\w+)=(.*)", line).groups()
        ranks[int(rank)][name] = value
    for rank, env in enumerate(ranks):
        expected = {
            "RANK": rank,
            "SIZE": 2,
            "LOCAL_RANK": rank,
            "LOCAL_SIZE": 2,
            "CROSS_RANK": 0,
            "CROSS_SIZE": 1,
            "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
            "START_TIMEOUT": 7,
            "GLOO_TIMEOUT_SECONDS": 8,
            "FUSION_THRESHOLD": 2 << 20,
            "CACHE_CAPACITY": 9,
            "AUTOTUNE": 1,
            "AUTOTUNE_LOG": "y.csv",
            "AUTOTUNE_WARMUP_SAMPLES": 2,
            "AUTOTUNE_STEPS_PER_SAMPLE": 4,
            "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": 6,
            "STALL_CHECK_DISABLE": 1,
            "TIMELINE": "x.json",
            "TIMELINE_MARK_CYCLES": 1,
            "STALL_CHECK_TIME_SECONDS": 4,
            "STALL_SHUTDOWN_TIME_SECONDS": 5,
            "LOG_LEVEL": "debug",
            "LOG_HIDE_TIME": 1,
        }
        assert {name: env[f"HOROVOD_{name}"] for name in expected} == {
            name: str(value) for name, value in expected.items()
        }
        assert 0 < int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"]) < 65536
        assert len(base64.b64decode(env["_HOROVOD_SECRET_KEY"])) == 32
        assert env["PYTHONUNBUFFERED"] == "1"
        assert {name for name in env if name.startswith("HOROPLUG_")} <= {
            "HOROPLUG_ALGORITHM",
            "HOROPLUG_TEST_SESSION",
        }
    assert ranks[0]["_HOROVOD_SECRET_KEY"] == ranks[1]["_HOROVOD_SECRET_KEY"]


def test_secret_is_not_printed():
    show = python(
        "secret = os.environ['_HOROVOD_SECRET_KEY']",
        "for name in os.listdir('/proc'):",
        "    if name.isdigit():",
        "        try: text = open(f'/proc/{name}/cmdline').read()",
        "        except OSError: continue",
        "        assert secret not in text, name",
        "print('SECRET', secret)",
    )
    done = launch("-np", 2, "--verbose", "--log-level", "TRACE", *show)
    assert done.returncode == 0, done.stderr
    secret = re.search("SECRET (.*)", done.stdout).group(1)
    assert "rank 0 is pid" in done.stderr
    assert secret not in done.stderr


def test_arguments_and_environment_are_passed_unchanged():
    odd = ["a b", "", "ü\n$x'\"", os.fsdecode(b"\xff\xfe"), "-np", "--verbose"]
    show = python("print([os.fsencode(a) for a in sys.argv[1:]], os.environb[b'ODD'])")
    done = launch("-np", 1, *show, *odd, env={"ODD": os.fsdecode(b"\xf0\x28")})
    arguments, value = [os.fsencode(argument) for argument in odd], b"\xf0("
    assert done.stdout == f"[0]<stdout>:{arguments} {value}\n"


def test_ranks_run_in_the_working_directory_of_the_launcher(tmp_path):
    done = launch("-np", 1, *python("print(os.getcwd(), sys.stdin.read() == '')"), cwd=tmp_path)
    assert done.stdout == f"[0]<stdout>:{tmp_path} True\n"
    # The ranks have the default handlers of SIGINT and SIGHUP.
    done = launch(
        "-np", 1, *python("import signal", "print(*map(signal.getsignal, (1, 2, 13, 15, 17)))")
    )
    assert "SIG_IGN" not in done.stdout.replace("Handlers.SIG_IGN", "", 1)  # Python's own SIGPIPE


def test_double_dash_ends_the_flags():
    assert parse(["-np", "2", "--", "prog", "--", "-np"]).command == ["prog", "--", "-np"]
    assert parse(["-np", "2", "prog", "--", "-np", "3"]).num_proc == 2


# ---- output ----------------------------------------------------------------------------------------------------------


@pytest.mark.short
def test_output_lines_of_ranks_are_not_mixed():
    done = launch(
        "-np",
        4,
        *python(
            "rank = os.environ['HOROVOD_RANK']",
            "for i in range(400):",
            "    for piece in (rank * 50, '-', rank * 5000 if i % 50 == 0 else '', str(i)):",
            "        sys.stdout.write(piece)",
            "    sys.stdout.write('\\n')",
            "    if i % 10 == 0: print('err', i, file=sys.stderr)",
        ),
    )
    assert done.returncode == 0
    seen = {rank: [] for rank in "0123"}
    for line in done.stdout.splitlines():
        rank, number = re.fullmatch(r"\[(\d)\]<stdout>:\1{50}-(?:\1{5000})?(\d+)", line).groups()
        # The number may begin with the repeated digit of the rank, which makes the pattern ambiguous.
        seen[rank].append(number)
    assert all(len(numbers) == 400 for numbers in seen.values())
    lines = done.stderr.splitlines()
    assert sorted(lines) == sorted(
        f"[{r}]<stderr>:err {i}" for r in range(4) for i in range(0, 400, 10)
    )


def test_last_line_without_newline_and_empty_line():
    done = launch("-np", 2, *python("print()", "print('no end', end='')"))
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[{rank}]<stdout>:{text}" for rank in (0, 1) for text in ("", "no end")
    )
    assert done.stdout.endswith("\n")


def test_invalid_utf8_passes_through():
    done = subprocess.run(
        [sys.executable, "-m", "horoplug.runner", "-np", "1", "printf", r"\377\000x\r\n"],
        env=ENV,
        capture_output=True,
        timeout=scaled(60),
    )
    assert done.stdout == b"[0]<stdout>:\xff\0x\n"


def test_output_is_forwarded_while_the_job_runs():
    """A line is forwarded when it is written, not when the job ends."""
    command = python("import signal", "print('first')", "signal.pause()")
    with subprocess.Popen(
        [sys.executable, "-m", "horoplug.runner", "-np", "1", *command],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        arrived = select.select([process.stdout], [], [], 60)[0]
        process.terminate()
        assert arrived
        assert process.stdout.readline() == "[0]<stdout>:first\n"
        process.wait(scaled(30))


@pytest.mark.parametrize(("size", "width"), [(1, 1), (2, 1), (11, 2)])
@pytest.mark.short
def test_output_files_per_rank(tmp_path, size, width):
    folder = tmp_path / "deep" / "logs"
    command = ["sh", "-c", "echo out $HOROVOD_RANK; printf 'err\\rX' >&2"]
    done = launch("-np", size, "--output-filename", folder, *command)
    assert done.returncode == 0, done.stderr
    for rank in range(size):
        place = folder / f"rank.{rank:0{width}d}"
        assert (place / "stdout").read_text() == f"out {rank}\n"
        assert (place / "stderr").read_bytes() == b"err\rX"
        assert {file.stat().st_mode & 0o777 for file in place.iterdir()} == {0o600}
        assert f"[{rank}]<stdout>:out {rank}\n" in done.stdout
    assert len(list(folder.iterdir())) == size


@pytest.mark.parametrize("flag", ["-prefix-timestamp", "--prefix-output-with-timestamp"])
def test_output_timestamps(flag):
    done = launch("-np", 1, flag, "echo", "hello")
    assert re.fullmatch(
        r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:hello\n", done.stdout
    )


def test_closed_output_pipe_ends_the_job():
    command = [sys.executable, "-m", "horoplug.runner", "-np", "2", "yes"]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout.readline().endswith(b"<stdout>:y\n")
        run.stdout.close()
        assert run.wait(scaled(30)) == 128 + 13
        assert run.stderr.read() == b""


def test_progress_bar_in_a_file(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    out, err = Screen(False), Screen(False)
    merged = output.RankOutput(2, (out, err))
    for percent in range(100):
        merged.feed(0, 1, b"\r %d%%" % percent)
        now[0] += 0.1
    merged.feed(0, 1, b"\r 100%\ndone\n")
    merged.close()
    lines = err.data.decode().splitlines()
    assert lines[0] == "[0]<stderr>: 0%"
    assert lines[-2:] == ["[0]<stderr>: 100%", "[0]<stderr>:done"]
    assert 10 <= len(lines) <= 14
    assert b"\r" not in err.data
    assert out.data == b""


def test_progress_bar_on_a_terminal():
    screen = Screen(True)
    merged = output.RankOutput(2, (screen, screen))
    merged.feed(0, 1, b"\r10%")
    assert screen.data == b"\r\x1b[K[0]<stderr>:10%"
    screen.data = b""
    merged.feed(1, 1, b"\r15%")  # only one bar is shown at a time
    assert screen.data == b""
    merged.feed(1, 0, b"text\n")  # is printed above the bar
    assert screen.data == b"\r\x1b[K[1]<stdout>:text\n[0]<stderr>:10%"
    screen.data = b""
    merged.feed(0, 1, b"\r100%\n")
    assert screen.data == b"\r\x1b[K[0]<stderr>:100%\n"
    screen.data = b""
    merged.feed(1, 1, b"\r20%")
    assert screen.data == b"\r\x1b[K[1]<stderr>:20%"
    merged.close()
    assert screen.data.endswith(b"\r\x1b[K[1]<stderr>:20%\n")


@pytest.mark.parametrize(
    ("bar", "shown"),
    [
        (b"short", b"short"),
        (b"123456", b"123456"),
        (b"1234567", b"123456"),  # the last cell stays free
        (b"\x1b[32m12\x1b[0m34567", b"\x1b[32m12\x1b[0m3456\x1b[0m"),
        (b"\x1b[32m1234567\x1b[0m", b"\x1b[32m123456\x1b[0m"),
        ("▏▎▍▌▋▊▉".encode(), "▏▎▍▌▋▊".encode()),
        ("中文字abc".encode(), "中文字".encode()),
        ("e\u0301".encode() * 8, "e\u0301".encode() * 6),
    ],
)
def test_wide_progress_bar_keeps_to_one_row(bar, shown):
    screen = Screen(True, columns=len("[0]<stderr>:") + 7)
    merged = output.RankOutput(1, (screen, screen))
    merged.feed(0, 1, b"\r" + bar)
    assert screen.data == b"\r\x1b[K[0]<stderr>:" + shown
    screen.data = b""
    merged.feed(0, 0, b"a line of text that may be longer\n")
    assert screen.data == (
        b"\r\x1b[K[0]<stdout>:a line of text that may be longer\n[0]<stderr>:" + shown
    )
    merged.feed(0, 1, b"\r" + bar + b"\n")
    assert screen.data.endswith(b"[0]<stderr>:" + bar + b"\n")


def test_endless_line_uses_bounded_memory():
    out = Screen(False)
    merged = output.RankOutput(1, (out, Screen(False)))
    for _ in range(5):
        merged.feed(0, 0, b"x" * (output.MAX_LINE // 2 + 1))
    assert len(merged._streams[0, 0].partial) <= output.MAX_LINE
    merged.close()
    assert out.data.count(b"x") == 5 * (output.MAX_LINE // 2 + 1)


def test_installed_commands():
    """If the package is installed, both command names exist and are the same program."""
    scripts = Path(sysconfig.get_path("scripts"))
    names = [scripts / name for name in ("horovodrun", "horoplugrun")]
    if not any(name.exists() for name in names):
        pytest.skip("horoplug is not installed in this environment")
    for name in names:
        done = subprocess.run(
            [name, "-np", "0", "true"], capture_output=True, text=True, timeout=scaled(60)
        )
        assert done.returncode == 2
        assert done.stderr.startswith("horovodrun: ")
