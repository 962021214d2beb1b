"""Repeated init and shutdown, processes without a launcher, forked children, and interrupted waits."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import horoplug as hvd
from tests.harness import ROOT
from tests.harness.limits import scaled
from tests.harness.support import (
    NO_LIMITS,
    environment,
    once_this_thread_waits,
    resources,
    run_script,
    until,
)

pytest_plugins = ["tests.harness.jobs"]

PER_RANK = [
    hvd.rank,
    hvd.size,
    hvd.local_rank,
    hvd.local_size,
    hvd.cross_rank,
    hvd.cross_size,
    hvd.is_homogeneous,
    hvd.barrier,
    lambda: hvd.allreduce(np.ones(2)),
    lambda: hvd.allgather_async(np.ones(2)),
    lambda: hvd.grouped_allreduce([np.ones(2)]),
    lambda: hvd.broadcast_object(1),
]


def check_not_initialized():
    assert not hvd.is_initialized()
    for call in PER_RANK:
        with pytest.raises(hvd.NotInitializedError, match=r"use hvd.init\(\)"):
            call()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.rank()
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.size(), everyone.included()) == (0, None, None)


def check_job():
    check_not_initialized()
    hvd.shutdown()
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    assert hvd.allreduce(np.ones(2), op=hvd.Sum)[0] == hvd.size()
    handle = hvd.allreduce_async(np.ones(2))
    hvd.synchronize(handle)
    late = hvd.allreduce_async(np.ones(2), name=f"only {hvd.rank()}")
    hvd.barrier()
    hvd.shutdown()
    hvd.shutdown()
    if hvd_size() > 1:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(late)
    check_not_initialized()
    hvd.init(comm=[], process_sets=[])
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        hvd.synchronize(late)
    fresh = hvd.allreduce_async(np.ones(2))
    assert fresh > late
    hvd.synchronize(fresh)
    hvd.shutdown()


def hvd_size():
    return int(os.environ["HOROVOD_SIZE"])


@pytest.mark.parametrize("hosts", ["a", "aa", "ab"])
@pytest.mark.short("aa*")
def test_init_and_shutdown_repeatedly(pool, hosts):
    with pool.ranks(len(hosts), hosts=hosts, init=False) as job:
        job.run(check_job)


def truncate_shared_memory():
    """Tries to shrink each shared-memory segment of this host's ranks, and returns which attempts succeeded."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:horoplug-"):
                files.append(int(fd))
    cut = []
    for fd in files:
        with contextlib.suppress(PermissionError):
            os.truncate(fd, 0)
            cut.append(fd)
    return len(files), cut, hvd.allreduce(np.ones(10_000), op=hvd.Sum)[0]


def test_no_rank_can_truncate_shared_memory(pool):
    """The others would be killed by a signal when they use it."""
    with pool.ranks(2) as job:
        assert job.run(truncate_shared_memory) == [(2, [], 2.0)] * 2


def check_cycles(count):
    def cycle():
        hvd.init()
        x = np.full(10_000, hvd.rank() + 1.0)
        assert hvd.allreduce(x, op=hvd.Sum)[0] == hvd.size() * (hvd.size() + 1) / 2
        hvd.allreduce_async(x, name="never waited for")
        assert hvd.allgather(x).shape == (10_000 * hvd.size(),)
        hvd.shutdown()

    for _ in range(count // 3):  # warm-up of allocators and caches
        cycle()
    before = resources()
    started = time.monotonic()
    for _ in range(count - count // 3):
        cycle()
    deadline = time.monotonic() + 5
    # The kernel may still count a thread for a moment after it was joined.
    while (after := resources())[1] > before[1] and time.monotonic() < deadline:
        pass
    print(f"{(time.monotonic() - started) / (count - count // 3) * 1e3:.2f} ms per cycle")
    more = [a > b for a, b in zip(after[:3], before[:3], strict=True)]
    assert not any(more), f"descriptors, threads, segments: {before[:3]} -> {after[:3]}"
    assert after[3] - before[3] < 4 * 1024, f"{after[3] - before[3]} KiB more after {count} cycles"


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aab"])
def test_init_cycles_leak_no_resources(pool, hosts):
    with pool.ranks(len(hosts), hosts=hosts, init=False) as job:
        job.run(check_cycles, 300, timeout=100)


def check_release(count):
    def job():
        hvd.init()
        x = np.full(10_000, hvd.rank() + 1.0)
        for _ in range(count):
            hvd.allreduce_async(x)
        done = [hvd.allreduce_async(x, op=hvd.Sum, name=f"done {n}") for n in range(count)]
        until(lambda: all(hvd.poll(handle) for handle in done))
        late = [hvd.allreduce_async(x, name=f"late {hvd.rank()} {n}") for n in range(count)]
        hvd.barrier()  # a rank that shuts down ends operations that others submit later
        hvd.shutdown()
        return done, late

    hvd.init()
    hvd.allreduce(np.ones(10_000))
    hvd.shutdown()
    before = resources()[:3]
    for _ in range(3):
        done, late = job()
        # The kernel may still count a thread for a moment after it was joined.
        until(lambda: resources()[1] <= before[1])
        after = resources()[:3]
        more = [a > b for a, b in zip(after, before, strict=True)]
        assert not any(more), f"descriptors, threads, segments: {before} -> {after}"
    for handle in done:
        assert hvd.poll(handle)
        assert hvd.synchronize(handle)[0] == hvd_size() * (hvd_size() + 1) / 2
    for handle in late:
        assert hvd.poll(handle)
        if hvd_size() > 1:
            with pytest.raises(hvd.HorovodInternalError, match="shut down"):
                hvd.synchronize(handle)


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aab"])
def test_shutdown_releases_resources_of_operations_not_waited_for(pool, hosts):
    """Handles that the program still has keep no descriptor, thread or segment; results that were there remain."""
    with pool.ranks(len(hosts), hosts=hosts, init=False) as job:
        job.run(check_release, 5)


def segment_blocks():
    """Bytes of memory in this host's shared-memory segments."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:horoplug-"):
                total += 512 * os.stat(f"/proc/self/fd/{fd}").st_blocks
    return total


def check_process_set_cycles(count):
    size, me = hvd.size(), hvd.rank()
    subsets = [[0, size - 1], list(range(1, size)), list(range(size - 1))]

    def cycle(number):
        ranks = subsets[number % len(subsets)] if number % 2 else subsets[0]
        process_set = hvd.add_process_set(ranks)
        if me in ranks:
            data = hvd.allreduce(np.full(10_000, me + 1.0), op=hvd.Sum, process_set=process_set)
            assert data[0] == sum(ranks) + len(ranks)
        hvd.allreduce(np.ones(3), name="beside")
        hvd.remove_process_set(process_set)

    for number in range(count // 3):
        cycle(number)
    hvd.barrier()
    before, blocks_before = resources(), segment_blocks()
    for number in range(count - count // 3):
        cycle(number)
    hvd.barrier()  # all ranks have removed the last set
    after, blocks = resources(), segment_blocks()
    more = [a > b for a, b in zip(after[:3], before[:3], strict=True)]
    assert not any(more), f"descriptors, threads, segments: {before[:3]} -> {after[:3]}"
    assert after[3] - before[3] < 2 * 1024, f"{after[3] - before[3]} KiB more after {count} sets"
    assert blocks - blocks_before < 1 << 20, f"{blocks - blocks_before} bytes of shared memory more"


@pytest.mark.parametrize("hosts", ["aaa", "abc", "aabb"])
def test_process_set_cycles_leak_no_resources(pool, hosts):
    with pool.ranks(len(hosts), hosts=hosts) as job:
        job.run(check_process_set_cycles, 300)


def check_idle_cycles(count):
    """Repeat init and shutdown without operations: a rank may leave while others are still connecting."""
    for _ in range(count):
        hvd.init()
        hvd.shutdown()


@pytest.mark.parametrize("hosts", ["aa", "ab", "aaa", "aab", "abc"])
def test_init_cycles_without_operations(pool, hosts):
    with pool.ranks(len(hosts), hosts=hosts, init=False) as job:
        job.run(check_idle_cycles, 200)


# ---- new processes --------------------------------------------------------------------------------------------------


def python(code, **variables):
    """Run code in a new process and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.short
def test_single_process_without_a_launcher():
    out = python(
        "import horoplug as hvd, numpy as np; hvd.init();"
        "print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),"
        " hvd.is_homogeneous(), hvd.allreduce(np.ones(2)), hvd.allgather(np.ones(1)), hvd.allgather_object('x'))"
    )
    assert out == "0 1 0 1 0 1 True [1. 1.] [1.] ['x']\n"


def test_exit_without_shutdown():
    """The process ends without a message, with and without operations in flight."""
    python("import horoplug as hvd, numpy as np; hvd.init(); hvd.allreduce_async(np.ones(9))")


def test_all_ranks_exit_with_operations_in_flight(tmp_path):
    """All ranks exit with operations in flight, without a message and without waiting."""
    script = tmp_path / "script.py"
    script.write_text(
        "import horoplug as hvd, numpy as np\n"
        "hvd.init()\n"
        "hvd.allreduce_async(np.ones(9), name=f'only {hvd.rank()}')\n"
        "hvd.barrier()\n"
    )
    for done in run_script(script, size=3, env=NO_LIMITS):
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.short(failure=True)
def test_exception_on_one_rank_fails_the_others(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import horoplug as hvd, numpy as np\n"
        "hvd.init()\n"
        "if hvd.rank() == 1: raise KeyError('mistake')\n"
        "hvd.allreduce(np.ones(9))\n"
    )
    done = run_script(script, size=3)
    assert all(process.returncode == 1 for process in done)
    assert "KeyError: 'mistake'" in done[1].stderr
    for process in (done[0], done[2]):
        assert "HorovodInternalError" in process.stderr
        assert "rank 1" in process.stderr


@pytest.mark.short
def test_import_loads_no_framework():
    python(
        "import sys; sys.modules.update(torch=None, tensorflow=None, jax=None)\n"
        "import horoplug as hvd\n"
        "assert 'numpy' not in sys.modules and 'horoplug._native' not in sys.modules\n"
        "hvd.init(); hvd.allreduce([1.0]); hvd.__version__, dir(hvd)\n"
        "from horoplug import *\n"
        "assert size() == 1 and allreduce is hvd.allreduce\n"
    )
    python(
        "import horoplug\n"
        "try: horoplug.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise SystemExit(1)\n"
    )


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "2"}, "HOROVOD_RANK=2"),
        ({"HOROVOD_SIZE": "two"}, "HOROVOD_SIZE='two'"),
    ],
)
def test_invalid_environment_is_refused_by_init(variables, text):
    code = (
        "import horoplug as hvd\n"
        "try: hvd.init()\n"
        "except ValueError as error: print(error)\n"
        "assert not hvd.is_initialized()\n"
    )
    assert text in python(code, **variables)


# ---- forked children ------------------------------------------------------------------------------------------------


def in_child(function):
    """Run a function in a forked child and return its output; the child must exit with status 0."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            os.write(write, repr(function()).encode())
            status = 0
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        text = stream.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, text
    return text


def check_fork():
    handle = hvd.allreduce_async(np.ones(100), name=f"early{hvd.rank()}")

    def child():
        check_not_initialized()
        hvd.shutdown()
        import gc

        gc.collect()
        for name in [n for n in os.environ if n.startswith(("HOROVOD_", "HOROPLUG_"))]:
            del os.environ[name]
        hvd.init()  # a separate job of one rank
        alone = hvd.size(), float(hvd.allreduce(np.full(2, 3.0))[0])
        hvd.shutdown()
        return alone

    assert in_child(child) == "(1, 3.0)"
    # The parent's job is unaffected.
    for rank in range(hvd.size()):
        if rank != hvd.rank():
            hvd.allreduce_async(np.ones(100), name=f"early{rank}")
    assert (hvd.synchronize(handle) == 1).all()
    assert hvd.allreduce(np.ones(2), op=hvd.Sum)[0] == hvd.size()
    # Ordinary exit of a child, with destructors and exit handlers.
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.execv(sys.executable, [sys.executable, "-c", "pass"])
    assert os.waitpid(child, 0)[1] == 0
    hvd.barrier()


@pytest.mark.parametrize("hosts", ["a", "aa", "ab"])
def test_forked_child_leaves_the_parent_job_intact(pool, hosts):
    with pool.ranks(len(hosts), hosts=hosts) as job:
        job.run(check_fork)


def test_forked_child_exits_without_ending_the_parent_job():
    """A child that exits normally, with exit handlers and destructors, does not end the parent's job."""
    out = python(
        "import os, horoplug as hvd, numpy as np\n"
        "hvd.init()\n"
        "child = os.fork()\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    print(hvd.size(), hvd.allreduce(np.ones(1)))\n"
    )
    assert out == "1 [1.]\n"


# ---- interrupts -----------------------------------------------------------------------------------------------------


def check_interrupt():
    """After a KeyboardInterrupt in a wait, the operation is still in flight and can be waited for again."""
    interrupt = os.kill, os.getpid(), signal.SIGINT
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(np.full(50_000, 1.0), op=hvd.Sum, name="late")
        with once_this_thread_waits(*interrupt), pytest.raises(KeyboardInterrupt):
            hvd.synchronize(handle)
        assert not hvd.poll(handle)
        # A blocking call returns no handle, but its buffers are still being written to.
        lost = np.full(50_000, 2.0)
        with once_this_thread_waits(*interrupt), pytest.raises(KeyboardInterrupt):
            hvd.allreduce(lost, op=hvd.Sum, name="lost")
        del lost
        hvd.allgather_object("go")
        assert (hvd.synchronize(handle) == hvd.size()).all()
    else:
        hvd.allgather_object("go")
        handle = hvd.allreduce_async(np.full(50_000, 2.0), op=hvd.Sum, name="lost")
        hvd.allreduce(np.full(50_000, 1.0), op=hvd.Sum, name="late")
        assert (hvd.synchronize(handle) == 2 * hvd.size()).all()
    hvd.barrier()


def test_keyboard_interrupt_ends_a_blocking_operation(pool):
    with pool.ranks(2) as job:
        job.run(check_interrupt)


def check_threads():
    """Many threads wait at the same time."""
    failures = []

    def work(number):
        try:
            for n in range(30):
                y = hvd.allreduce(np.full(10 * number + 1, 1.0), op=hvd.Sum, name=f"{number}.{n}")
                assert (y == hvd.size()).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(30))
        assert not thread.is_alive()
    assert not failures


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_operations_from_several_threads(pool, hosts):
    with pool.ranks(len(hosts), hosts=hosts) as job:
        job.run(check_threads)
