"""``horoplug.run``: results by rank, errors and interrupts, and no process, file or descriptor left behind."""

import asyncio
import contextlib
import functools
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import cloudpickle
import numpy as np
import pytest

import horoplug
from horoplug import RankError, run
from horoplug.rendezvous.errors import AuthenticationError
from horoplug.rendezvous.network import listener
from horoplug.rendezvous.network.auth import Role, authenticate
from horoplug.runner.functions import exchange
from tests.harness.leftovers import MARK, processes
from tests.harness.leftovers import nothing_is_left as nothing_is_left
from tests.harness.limits import scaled
from tests.harness.strangers import RefusingServer
from tests.harness.support import environment, until

# As for functions of a notebook, the ranks cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("nothing_is_left")


class MyError(Exception):
    """An exception class of the program, with its own arguments."""

    def __init__(self, number, text):
        super().__init__(f"{text} ({number})")
        self.number = number

    def __reduce__(self):
        return type(self), (self.number, "again")


def rank():
    return int(os.environ["HOROVOD_RANK"])


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.short
def test_run_returns_results_by_rank():
    def work(base, *, factor):
        import numpy as np

        import horoplug as hvd

        hvd.init()
        total = hvd.allreduce(np.array([base + hvd.rank()]), op=hvd.Sum)
        return hvd.rank(), hvd.size(), int(total[0]) * factor

    assert run(work, (10,), {"factor": 2}, num_proc=3) == [(r, 3, 66) for r in range(3)]


def test_one_process_and_the_deprecated_np_argument():
    assert run(os.getpid) != [os.getpid()]
    with pytest.warns(DeprecationWarning, match="num_proc"):
        assert run(rank, np=2) == [0, 1]


def test_large_results():
    """The results exceed the size limit of the rendezvous' messages."""

    def work(size):
        return np.full(size, rank(), np.float32)

    found = run(work, (12_000_000,), num_proc=2)
    for number, array in enumerate(found):
        assert array.shape == (12_000_000,)
        assert (array == number).all()


def test_large_functions_are_sent():
    data = np.arange(6_000_000)
    assert run(lambda: int(data.sum()), num_proc=2) == [int(data.sum())] * 2


def test_objects_of_classes_defined_in_main():
    (found,) = run(lambda: MyError(3, "as a result"))
    assert type(found) is MyError


def test_settings_are_passed_to_the_ranks(tmp_path):
    outer = {k: v for k, v in os.environ.items() if "HOROVOD" not in k} | {"MINE": "1"}
    env, _ = run(
        lambda: dict(os.environ),
        num_proc=2,
        hosts="localhost:2",
        env=outer | {"HOROPLUG_RANK": "7", "HOROVOD_CACHE_CAPACITY": "5"},
        start_timeout=17,
        output_filename=tmp_path / "logs",
        use_gloo=True,
    )
    ours = {name: value for name, value in env.items() if "HOROVOD_" in name}
    assert ours["HOROVOD_START_TIMEOUT"] == "17"
    assert ours["HOROVOD_CACHE_CAPACITY"] == "5"
    assert ours["HOROVOD_SIZE"] == "2"
    assert "HOROVOD_CYCLE_TIME" not in ours
    assert env["MINE"] == "1"
    assert "HOROPLUG_RANK" not in env
    assert not [name for name in env if "HOROPLUG_RUN" in name]
    assert (tmp_path / "logs" / "rank.1" / "stdout").exists()


def test_functions_and_classes_of_main_and_a_sibling_module(tmp_path):
    """Functions and classes of __main__, and a module beside it."""
    (tmp_path / "beside.py").write_text("def double(x): return 2 * x\n")
    program = tmp_path / "program.py"
    program.write_text("""
import sys
import beside, horoplug
class Point:
    def __init__(self, x): self.x = x
def work(point):
    print("text of a rank")
    return Point(beside.double(point.x))
if __name__ == "__main__":
    found = horoplug.run(work, (Point(4),), num_proc=2, prefix_output_with_timestamp=True)
    assert all(type(point) is Point for point in found)
    print([point.x for point in found])
""")
    done = subprocess.run(
        [sys.executable, program],
        env=environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == "[8, 8]"
    assert sorted(line[24:] for line in lines[:-1]) == [
        "[0]<stdout>:text of a rank",
        "[1]<stdout>:text of a rank",
    ]


FAKE_SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
shift 2
exec sh -c "$*"
"""


def test_run_on_several_hosts_of_one_machine(tmp_path, monkeypatch):
    """One host is reached through a script in place of ssh."""
    ssh = tmp_path / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("HOROPLUG_SSH", str(ssh))

    def work():
        import horoplug as hvd

        hvd.init()
        return hvd.rank(), hvd.local_rank(), hvd.cross_rank()

    found = run(work, num_proc=3, hosts="localhost:1,elsewhere:2", verbose=1)
    assert found == [(0, 0, 0), (1, 0, 1), (2, 1, 0)]
    # Python may have another path on the other host.
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setenv("HOROPLUG_REMOTE_PYTHON", str(python))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    here, there = run(lambda: sys.executable, num_proc=2, hosts="localhost:1,elsewhere:1")
    assert (here, there) == (sys.executable, str(python))


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.short(failure=True)
def test_exception_of_a_rank_is_raised():
    def work():
        import horoplug as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise MyError(7, "something is wrong")
        hvd.barrier()  # the other ranks fail as a consequence

    with pytest.raises(RankError) as caught:
        run(work, num_proc=3)
    error = caught.value
    assert error.rank == 1
    assert str(error).startswith(
        "rank 1: tests.launcher.test_run.MyError: something is wrong (7)\n\nTraceback "
    )
    assert 'raise MyError(7, "something is wrong")' in error.traceback
    assert "run_task.py" not in error.traceback
    assert type(error.__cause__) is MyError
    assert error.__cause__.number == 7
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.traceback) == (str(error), 1, error.traceback)


def test_unpicklable_exception_is_described():
    def work():
        error = ValueError("odd")
        error.lock = threading.Lock()
        raise error

    with pytest.raises(RankError, match="rank 0: ValueError: odd") as caught:
        run(work)
    assert caught.value.__cause__ is None


def fail_on_1(how):
    def work():
        if rank() == 1:
            how()
        while True:  # the launcher ends this rank after rank 1 has failed
            signal.pause()

    return work


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda: sys.exit(3), r"rank 1: the function called sys.exit\(3\)"),
        (sys.exit, r"rank 1: the function called sys.exit\(\)"),
        (lambda: os._exit(5), r"rank 1 exited with code 5; the other ranks were ended"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            r"rank 1 was killed by signal 9 \(SIGKILL\); the other ranks were ended",
        ),
    ],
)
def test_rank_that_exits_is_an_error(how, message):
    with pytest.raises(RankError, match=message) as caught:
        run(fail_on_1(how), num_proc=2)
    assert caught.value.rank == 1


def test_rank_that_exits_with_0_before_returning_is_an_error():
    with pytest.raises(RankError, match="rank 0 ended before its function returned"):
        run(lambda: os._exit(0))


def test_failing_function_with_a_running_thread():
    def work():
        threading.Thread(target=threading.Event().wait).start()
        raise ValueError("the end")

    with pytest.raises(RankError, match="rank 0: ValueError: the end"):
        run(work)


def test_unpicklable_result_is_an_error():
    with pytest.raises(RankError, match=r"result, a _thread.lock, cannot be pickled: ") as caught:
        run(lambda: (b"x" * 3_000_000, threading.Lock())[1] if rank() else 1, num_proc=2)
    assert caught.value.rank == 1
    # The same after a part of the result has been sent.
    with pytest.raises(RankError, match=r"result, a builtins.list, cannot be pickled: "):
        run(lambda: [b"x" * 3_000_000, threading.Lock()])


def test_function_that_cannot_be_unpickled_is_an_error(tmp_path, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "soon_gone.py").write_text("def work(): pass\n")
    monkeypatch.syspath_prepend(str(folder))
    import soon_gone

    (folder / "soon_gone.py").unlink()
    with pytest.raises(RankError, match="rank 0: ModuleNotFoundError: No module named 'soon_gone'"):
        run(soon_gone.work)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"min_num_proc": 3, "max_num_proc": 2},
            ValueError,
            "min_num_proc 3 is more than max_num_proc 2",
        ),
        ({"min_num_proc": 0}, ValueError, ": min_num_proc: at least 1 is wanted, not 0$"),
        (
            {"host_discovery_script": "x", "hosts": "a:1"},
            ValueError,
            "host_discovery_script: not allowed with hosts or hostfile$",
        ),
        ({"max_num_proc": 2, "use_mpi": True}, ValueError, "an MPI job cannot come and go"),
        ({"min_num_proc": 1, "cooldown_range": (1, 2, 3)}, ValueError, "two numbers are wanted"),
        ({"min_num_proc": 1, "cooldown_range": (3, 2)}, ValueError, "cooldown.*3 is more than 2"),
        ({"use_gloo": True, "use_mpi": True}, ValueError, "use_gloo or use_mpi, not both"),
        ({"num_proc": 0}, ValueError, "horoplug.run: num_proc: at least 1 is wanted, not 0$"),
        ({"num_proc": 3, "hosts": "localhost:2"}, ValueError, "3 is more than .*: 2 slots"),
        ({"executable": "no-python"}, ValueError, "there is no program 'no-python'"),
        ({"hosts": "a:1", "hostfile": "b"}, ValueError, ": hostfile: not allowed with hosts$"),
        ({"network_interface": "nonesuch0"}, ValueError, "no network interface nonesuch0"),
        ({"network_interfaces": ["nonesuch0", "none1"]}, ValueError, "nonesuch0 or none1"),
        ({"ssh_port": 0}, ValueError, ": ssh_port: at least 1 is wanted"),
        ({"use_mpi": True, "env": {"PATH": "/nonesuch"}}, ValueError, "there is no mpirun on PATH"),
        ({"output_filename": "/dev/null/x"}, ValueError, ": output_filename: Not a directory"),
    ],
)
def test_invalid_arguments_are_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        run(rank, **arguments)


def test_non_functions_and_unpicklable_arguments_are_refused():
    with pytest.raises(TypeError, match="wants a function, not 3"):
        run(3)
    lock = threading.Lock()
    nested = {"a": [1, {"b": lock}]}
    for function, args, name in (
        (lambda: nested, (), r"the variable nested\['a'\]\[1\]\['b'\] of test_non_\S*<lambda>"),
        (functools.partial(len, lock), (), r"the function\.args\[0\]"),
        (len, ([lock],), r"args\[0\]\[0\]"),
    ):
        match = rf"cannot be pickled and sent to the ranks: {name}, a _thread.lock, .*cannot pickle"
        with pytest.raises(TypeError, match=match) as caught:
            run(function, args)
        assert "\n" not in str(caught.value)


# ---- callers ---------------------------------------------------------------------------------------------------------


class Stream(io.StringIO):
    """Replaces sys.stdout, as in a notebook, and signals when a text was written."""

    def __init__(self, text, action):
        super().__init__()
        self.text, self.action = text, action

    def write(self, text):
        count = super().write(text)
        if self.text in self.getvalue():
            self.action()
            self.text = "nothing more"
        return count


def test_output_is_forwarded_while_the_function_runs(tmp_path, monkeypatch):
    """The function returns only after its first line was forwarded."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def work():
        print("fi\u00dfrst")
        open(gate).close()
        print("second", file=sys.stderr)

    stream, errors = Stream("first", lambda: open(gate, "w").close()), io.StringIO()
    stream.text = "[0]<stdout>:fi\u00dfrst\n"
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", errors)
    run(work)
    assert stream.getvalue() == "[0]<stdout>:fi\u00dfrst\n"
    assert errors.getvalue() == "[0]<stderr>:second\n"


def test_long_lines_of_multibyte_characters(monkeypatch):
    """The output arrives in parts of even lengths, most of which begin and end within a character."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    line = "x" + "\u00df" * 200_000
    run(lambda: print(line))
    assert stream.getvalue() == f"[0]<stdout>:{line}\n"


def test_run_in_a_thread_and_in_an_event_loop():
    async def main():
        direct = run(rank, num_proc=2)
        return direct, await asyncio.to_thread(run, rank, num_proc=2)

    before = signal.getsignal(signal.SIGINT)
    assert asyncio.run(main()) == ([0, 1], [0, 1])
    assert signal.getsignal(signal.SIGINT) is before


def test_run_inside_of_a_job():
    assert run(lambda: horoplug.run(rank, num_proc=2), num_proc=2) == [[0, 1], [0, 1]]


PROGRAM = """
import signal, sys
import horoplug
def work():
    print("ready", flush=True)
    while True: signal.pause()
try:
    horoplug.run(work, {arguments})
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.fixture(params=["num_proc=2", "min_num_proc=2"])
def program(request):
    """A program whose ranks have started and never end, and the mark of its processes."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(arguments=request.param)],
        env=environment() | {MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert [process.stdout.readline()[3:] for _ in range(2)] == ["<stdout>:ready\n"] * 2
            yield process, mark
        finally:
            process.kill()


def test_keyboard_interrupt_ends_the_job(program):
    process, mark = program
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=scaled(30))
    assert out == "interrupted\n"
    assert not processes(mark)


def test_terminal_interrupt_ends_the_job():
    """The interrupt reaches every process of the terminal and counts once, so that ranks can clean up."""
    work = """
    import time
    def tidy(*_):
        time.sleep(0.5)
        print("tidied up", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, tidy)
    print("ready", flush=True)
"""
    program = PROGRAM.format(arguments="num_proc=2").replace(
        '    print("ready", flush=True)\n', work.removeprefix("\n")
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment() | {MARK: os.environ[MARK]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert [process.stdout.readline()[3:] for _ in range(2)] == ["<stdout>:ready\n"] * 2
            os.killpg(process.pid, signal.SIGINT)
            out, _ = process.communicate(timeout=scaled(30))
        finally:
            process.kill()
    *ranks, last = out.splitlines()
    assert sorted(ranks) == [f"[{r}]<stdout>:tidied up" for r in range(2)]
    assert last == "interrupted"


def test_ranks_end_when_the_program_is_killed(program):
    process, mark = program
    process.kill()
    until(lambda: not processes(mark))


def test_job_fails_when_the_launcher_is_killed(tmp_path):
    def work():
        if rank() == 0:
            import psutil

            psutil.Process().parent().parent().parent().kill()  # agent, guard, launcher
        signal.pause()

    with pytest.raises(RankError, match="the launcher ended with code -9; all ranks were ended"):
        run(work, num_proc=2)
    until(lambda: not processes(os.environ[MARK]))


# ---- the exchange ----------------------------------------------------------------------------------------------------

SECRET = bytes(range(32))


@pytest.fixture
def served(tmp_path):
    """An exchange for two ranks, and their files."""
    names = [tmp_path / name for name in ("function", "0", "1")]
    names[0].write_bytes(b"f" * 3_000_000)
    with contextlib.ExitStack() as stack:
        function, *results = [stack.enter_context(name.open("a+b")).fileno() for name in names]
        server = exchange.Exchange(SECRET, "127.0.0.1", function, results)
        stack.callback(server.close)
        yield server, names[1:]


def client(server, number):
    return exchange.Client("127.0.0.1", server.port, SECRET, number)


def test_functions_and_results_are_exchanged_in_chunks(served):
    server, files = served
    first, second = client(server, 1), client(server, 0)
    assert first.function() == second.function() == b"f" * 3_000_000
    first.write(b"taken back")
    first.finish(exchange.WITHDRAWN)
    for piece in (b"a", b"", b"b" * (3 * exchange.CHUNK_BYTES + 1)):
        first.write(piece)
    first.finish(exchange.RAISED)
    assert server.raised == [1]
    assert files[1].read_bytes() == b"a" + b"b" * (3 * exchange.CHUNK_BYTES + 1)
    second.finish(exchange.RETURNED)
    assert server.returned == {0}
    assert files[0].read_bytes() == b""
    for one in (first, second):
        one._sock.close()


def test_silent_host_displaces_only_its_own_connections(served, monkeypatch):
    """A host is recognised by its address. Here the strangers have 127.0.0.2."""
    server, _ = served
    monkeypatch.setattr(listener, "MOST_UNAUTHENTICATED", 8)
    address = "127.0.0.1", server.port
    rank = socket.create_connection(address, timeout=20)
    source = ("127.0.0.2", 0)
    strangers = [
        socket.create_connection(address, timeout=20, source_address=source) for _ in range(40)
    ]
    for stranger in strangers[:30]:
        with contextlib.suppress(ConnectionError):
            while stranger.recv(4096):
                pass
    authenticate(rank, SECRET, Role.CLIENT, exchange._CONTEXT, 10.0, "launcher")
    for sock in [rank, *strangers]:
        sock.close()


def test_rank_retries_when_an_unauthenticated_launcher_rejects_it(tmp_path):
    """A process without the job's secret listens at the port of the exchange and rejects the rank. The exchange listens
    there when that process has ended."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((tmp_path / name).open("a+b")).fileno() for name in "fr"]
        os.write(files[0], b"function")
        stranger = stack.enter_context(RefusingServer(socket.AF_INET, ("127.0.0.1", 0)))
        port = stranger.address[1]
        received = []

        def rank():
            connected = exchange.Client("127.0.0.1", port, SECRET, 0)
            received.append(bytes(connected.function()))
            connected.finish(exchange.RETURNED)
            connected._sock.close()

        thread = threading.Thread(target=rank, daemon=True)
        thread.start()
        assert stranger.refused.wait(scaled(20))
        stranger.close()
        stack.callback(exchange.Exchange(SECRET, "127.0.0.1", files[0], files[1:], port).close)
        thread.join(scaled(60))
        assert received == [b"function"]


def test_client_without_the_secret_gets_nothing(served):
    server, files = served
    with pytest.raises(AuthenticationError):
        exchange.Client("127.0.0.1", server.port, bytes(32), 0, seconds=0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(b"\x00\x00\x00\x00" + pickle.dumps(os.getpid) * 10)
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(4096):
                received += data
        assert len(received) <= 80, "a greeting and a refusal at most"
    assert files[0].read_bytes() == b""
    one = client(server, 0)
    assert len(one.function()) == 3_000_000
    one._sock.close()


def test_taken_and_invalid_ranks_are_refused(served):
    server, _ = served
    first = client(server, 1)
    first.function()
    for number in (1, 2, 2**32 - 1):
        other = client(server, number)
        with pytest.raises(ConnectionError):
            other.function()
        other._sock.close()
    first._sock.close()


def test_result_that_cannot_be_stored_is_an_error(served, tmp_path):
    server, _ = served
    with open("/dev/full", "wb", buffering=0) as full:
        server._files = [full.fileno(), full.fileno()]
        one = client(server, 0)
        one.function()
        one.write(b"x")
        with pytest.raises(ConnectionError):
            one.finish(exchange.RETURNED)
        one._sock.close()
        until(lambda: server.problems)
    assert server.problems == {0: "No space left on device"}
    assert not server.returned


def test_result_files_are_made_on_demand(tmp_path):
    folder = tmp_path / "files"
    files = exchange.ResultFiles(str(folder), 2, 1 << 32)
    with open(tmp_path / "function", "w+b") as function, open(tmp_path / "all", "w+b") as target:
        server = exchange.Exchange(SECRET, "127.0.0.1", function.fileno(), files)
        try:
            one = client(server, 5)
            with pytest.raises(ConnectionError):
                one.function()
            until(lambda: server.problems == {5: "No such file or directory"})
            one._sock.close()
            folder.mkdir()
            for number, size in ((70_000, 3 * exchange.CHUNK_BYTES + 1), (5, 2)):
                one = client(server, number)
                one.function()
                one.write(b"x" * size)
                one.finish(exchange.RETURNED)
                one._sock.close()
            lost = client(server, 6)
            lost.function()
            lost.write(b"a part")
            until(lambda: os.fstat(files[6]).st_size)
            lost._sock.close()
            until(lambda: not os.fstat(files[6]).st_size)
        finally:
            server.close()
        assert server.returned == {5, 70_000}
        assert not list(folder.iterdir())
        before = len(os.listdir("/proc/self/fd"))
        assert files.move(5, target.fileno()) == 0
        assert files.move(70_000, target.fileno()) == 2
        assert len(os.listdir("/proc/self/fd")) == before - 2
        assert target.read() == b""
        assert os.fstat(target.fileno()).st_size == 3 * exchange.CHUNK_BYTES + 3
        os.close(files[6])


def test_closing_does_not_wait_for_ranks(served):
    server, _ = served
    one = client(server, 0)
    one.function()
    start = time.monotonic()
    server.close()
    assert time.monotonic() - start < scaled(5)
    with pytest.raises(ConnectionError):
        one.finish(exchange.RETURNED)
    one._sock.close()
