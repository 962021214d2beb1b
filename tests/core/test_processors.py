"""The processors of an engine's threads: those of the host's ranks together, where each rank is bound to one."""

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from horoplug.base import cgroup
from horoplug.base.processors import engine_processors, own_processors, starting_threads_on
from horoplug.rendezvous.connections.peers import connect_peers
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer
from tests.harness import program_text
from tests.harness.limits import scaled
from tests.harness.support import environment

# As mpirun --bind-to core does: each process starts on the processor that it is bound to.
BOUND = program_text("tests/core/programs/processors_bound.py")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.short
def test_progress_thread_of_a_bound_rank(count):
    """It may use the processors of all ranks of the host; the main thread keeps the one that it is bound to."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < count:
        pytest.skip("needs two processors")
    command = [sys.executable, "-m", "horoplug.runner", "-np", "2", sys.executable, "-c", BOUND]
    done = subprocess.run(
        [*command, str(count)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line.partition(":")[2]) for line in done.stdout.splitlines()]
    assert rows == [[True, available[:count]]] * 2


def test_binding_that_leaves_enough_processors_is_kept():
    own = own_processors()
    assert own >= os.sched_getaffinity(0)
    more = own | {1000}
    assert engine_processors(more, 1) == (own if len(own) > 1 else more)
    assert engine_processors(more, len(own) + 1) == more
    before = os.sched_getaffinity(0)
    with starting_threads_on({100_000}):  # does not exist
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


# ---- quotas ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def process(tmp_path):
    """A function that describes a process with these control groups, as /proc does, and writes the groups' files.

    ``groups``: lines of /proc/self/cgroup. ``mounts``: (type, mounted group, place, options). ``files``: by path."""

    def describe(groups, mounts, files):
        folder = tmp_path / "process"
        folder.mkdir()
        folder.joinpath("cgroup").write_text("".join(f"{line}\n" for line in groups))
        lines = [
            f"30 23 0:26 {root} {tmp_path}/{place} rw,nosuid - {kind} none rw,{options}\n"
            for kind, root, place, options in mounts
        ]
        other = [
            "23 1 0:1 / / rw - ext4 /dev/sda rw\n",
            "24 23 0:2 / /proc rw shared:1 - proc proc rw\n",
        ]
        folder.joinpath("mountinfo").write_text("".join([*other, *lines]))
        for path, text in files.items():
            file = tmp_path / path.replace("\\040", " ")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        return folder

    return describe


def test_quota_of_a_container_with_its_own_namespace(process):
    """The container's own group appears as the root of the hierarchy."""
    folder = process(
        ["0::/"], [("cgroup2", "/", "c", "nsdelegate")], {"c/cpu.max": "150000 100000"}
    )
    assert list(cgroup.limits(folder).values()) == [1.5]


def test_quotas_of_nested_groups(process):
    """Quotas of parent groups apply as well, and "max" means no limit."""
    files = {
        "c/job/cpu.max": "400000 100000",
        "c/job/step/cpu.max": "max 100000",
        "c/job/step/task/cpu.max": "100000 50000",
        "c/job/other/cpu.max": "1000 100000",
    }
    folder = process(["0::/job/step/task"], [("cgroup2", "/", "c", "memory_recursiveprot")], files)
    assert sorted(cgroup.limits(folder).values()) == [2.0, 4.0]


@pytest.mark.parametrize("root", ["/", "/docker/1"])
def test_quota_of_cgroup_version_1(process, root):
    """A container without a namespace of its own sees its group's full path, and only its own group is mounted."""
    inside = "" if root != "/" else "docker/1/"
    files = {
        f"cpu\\040time/{inside}cpu.cfs_quota_us": "50000",
        f"cpu\\040time/{inside}cpu.cfs_period_us": "100000",
        "memory/docker/1/cpu.cfs_quota_us": "1",
        "cpu\\040time/cpu.shares": "1024",
    }
    groups = [
        "12:memory:/docker/1",
        "4:cpuacct,cpu:/docker/1",
        "1:name=systemd:/docker/1",
        "0::/docker/1",
    ]
    mounts = [
        ("cgroup", root, "cpu\\040time", "cpu,cpuacct"),
        ("cgroup", root, "memory", "memory"),
        ("cgroup2", root, "unified", ""),
    ]
    assert list(cgroup.limits(process(groups, mounts, files)).values()) == [0.5]


def test_absent_and_unreadable_quotas_are_no_limit(process, tmp_path):
    files = {"c/a/cpu.max": "max 100000", "c/cpu.max": "nonsense"}
    folder = process(
        ["0::/a", "3:cpu:/../.."], [("cgroup2", "/", "c", ""), ("cgroup", "/", "v1", "cpu")], files
    )
    assert cgroup.limits(folder) == {}
    assert cgroup.limits(tmp_path / "nothing") == {}
    for share in cgroup.limits().values():  # whatever this process has
        assert share > 0


@pytest.fixture
def group():
    """A control group of this machine with a quota of 1.5 processors; skips the test where none can be made."""
    for parent, file, text in (
        ("/sys/fs/cgroup", "cpu.max", "150000 100000"),
        ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "150000"),
    ):
        folder = Path(parent, f"horoplug-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            with contextlib.suppress(OSError):
                if (folder / file).exists():  # made by the kernel
                    (folder / file).write_text(text)
                    yield folder
                    return
        finally:
            folder.rmdir()
    pytest.skip("no control group with a quota can be made here")


@pytest.mark.short
def test_quota_of_a_real_control_group(group):
    script = (
        "import os, sys\n"
        "open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from horoplug.base import cgroup\n"
        "print(cgroup.quota([cgroup.limits()] * 2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(group)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert 0 < float(done.stdout) <= 1.5, done.stderr


def test_quota_that_ranks_share():
    """The result is the number of processors for all ranks of the host."""
    assert cgroup.quota([{}, {}]) == 0
    assert cgroup.quota([{"a": 1.5}] * 2) == 1.5
    assert cgroup.quota([{"a": 4.0}] * 2) == 4.0
    assert cgroup.quota([{"a": 1.0}, {"b": 1.0}]) == 2.0  # each has a processor's time of its own
    assert cgroup.quota([{"a": 1.0, "all": 1.5}, {"b": 1.0, "all": 1.5}]) == 1.5
    assert cgroup.quota([{}, {}, {"a": 0.5}]) == 1.5  # one rank is slower than the others


@pytest.mark.parametrize(
    ("share", "crowded"), [("max", False), ("800000", False), ("150000", True)]
)
def test_ranks_learn_their_quota(process, monkeypatch, share, crowded):
    """Three ranks in one control group agree on their quota."""
    folder = process(["0::/"], [("cgroup2", "/", "c", "")], {"c/cpu.max": f"{share} 100000"})
    monkeypatch.setattr(cgroup, "PROCESS", folder)
    secret = os.urandom(32)
    with StoreServer(secret) as server, ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        clients = [
            stack.enter_context(StoreClient.connect(*server.address, secret, 20)) for _ in range(3)
        ]
        made = [
            pool.submit(connect_peers, rank=rank, size=3, store=client, secret=secret, timeout=60)
            for rank, client in enumerate(clients)
        ]
        for each in made:
            connections = each.result(60)
            quota = connections.release()["processor_quota"]
            connections.owned = True
            connections.close()
            assert quota == (0 if share == "max" else int(share) / 100000)
            assert (0 < quota < 3) == crowded
