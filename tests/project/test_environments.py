"""Jobs in environments that lack what a usual machine has: each works, or says in one line what is missing."""

import os
import platform
import shutil
import subprocess
import sys

import pytest

from tests.harness import ROOT, program_text
from tests.harness.limits import scaled

JOB = """
import numpy as np
import horoplug as hvd

hvd.init()
assert hvd.allreduce(np.ones(300_000), op=hvd.Sum)[-1] == hvd.size()
assert hvd.broadcast_object(["an object"] if hvd.rank() == 0 else None) == ["an object"]
assert len(hvd.allgather(np.ones(100_000 * (hvd.rank() + 1)))) == 300_000
print("done")
"""
# Installs a seccomp filter, under which these system calls fail with this error, and runs a command:
# NAME=NUMBER... ERROR -- COMMAND...
FILTER = program_text("tests/project/programs/environments_filter.py")
# Numbers on x86-64. Docker's default profile refuses these and others to a container without capabilities.
MEMFD_CREATE = 319
OF_CONTAINERS = {
    "unshare": 272,
    "mount": 165,
    "setns": 308,
    "ptrace": 101,
    "process_vm_readv": 310,
    "kcmp": 312,
    "perf_event_open": 298,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "set_mempolicy": 238,
    "mbind": 237,
    "move_pages": 279,
    "open_by_handle_at": 304,
    "add_key": 248,
    "keyctl": 250,
}
EPERM, ENOSYS = 1, 38


def without_calls(numbers, error):
    return [sys.executable, "-c", FILTER, *map(str, numbers), str(error), "--"]


def in_namespace(kind, script):
    """A command prefix: a shell runs the script in a new namespace and then the command."""
    return ["unshare", f"--{kind}", "sh", "-c", f'set -e; {script}; exec "$@"', "sh"]


# Those that need root are skipped for other users.
ENVIRONMENTS = {
    "no /dev/shm": in_namespace("mount", "mount -t tmpfs -o ro,mode=000 none /dev/shm"),
    "64 MB of /dev/shm": in_namespace("mount", "mount -t tmpfs -o size=64m none /dev/shm"),
    "seccomp profile of containers": without_calls(OF_CONTAINERS.values(), EPERM),
    "read-only home": in_namespace("mount", 'mount -t tmpfs -o ro none "$HOME"'),
    "loopback only": in_namespace("net", "ip link set lo up"),
    "no IPv4": in_namespace("net", "ip link set lo up; ip -4 address flush dev lo"),
    "host name that does not resolve": in_namespace("uts", "hostname no-such-host-of-horoplug"),
    "no user of this number": ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"],
}


def run(prefix, *options, code=JOB, home, **variables):
    command = [sys.executable, "-m", "horoplug.runner", "-np", "2", *options]
    return subprocess.run(
        [*prefix, *command, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=scaled(100),
        cwd=ROOT,
        env=os.environ | {"HOME": str(home), "TMPDIR": "/tmp"} | variables,
    )


@pytest.fixture
def home(tmp_path):
    """A home folder of its own. Any user may write to it."""
    tmp_path.chmod(0o777)
    return tmp_path


needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")


@needs_x86
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for namespaces")
@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.short
def test_job_runs_in(name, home):
    prefix = ENVIRONMENTS[name]
    if shutil.which(prefix[0]) is None:
        pytest.skip(f"needs {prefix[0]}")
    if name == "no IPv4" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("needs IPv6")
    if subprocess.run([*prefix, "test", "-r", ROOT / "setup.py"]).returncode != 0:
        pytest.skip("this user cannot read the checkout")
    done = run(prefix, home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("]<stdout>:done\n") == 2


@needs_x86
@pytest.mark.short(failure=True)
def test_missing_memfd_create_is_one_line(home):
    done = run(without_calls([MEMFD_CREATE], ENOSYS), home=home)
    assert done.returncode == 1
    wanted = "memfd_create, which is not possible here (Function not implemented)"
    assert sum(wanted in line for line in done.stderr.splitlines()) == 2  # once on each rank


@pytest.mark.parametrize(
    ("system", "libc", "wanted"),
    [
        ("darwin", "", "horoplug runs on Linux only, and this is darwin: use a Linux container"),
        (
            "win32",
            "",
            "horoplug runs on Linux only, and this is win32: use WSL 2 or a Linux container",
        ),
        (
            "linux",
            "musl",
            "horoplug needs glibc, and this system has musl: use an image of Debian, Ubuntu, Fedora",
        ),
    ],
)
def test_installing_elsewhere_is_one_line(system, libc, wanted):
    """As pip runs setup.py there. macOS, Windows and Alpine are simulated."""
    code = f"""
import runpy, sys, sysconfig, setuptools
sys.platform = {system!r}
known = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: (
    "x86_64-pc-linux-{libc or "gnu"}" if name == "HOST_GNU_TYPE" else known(name)
)
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=scaled(60)
    )
    assert done.returncode == 1
    assert done.stderr.startswith(wanted)
    assert done.stderr.count("\n") == 1
