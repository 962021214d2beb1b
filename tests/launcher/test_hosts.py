"""Jobs on several hosts. Each host is a network namespace with an sshd, which horovodrun reaches by ssh."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.harness import ROOT, program_text
from tests.harness.limits import scaled
from tests.harness.mpi_jobs import between_hosts
from tests.harness.mpi_jobs import place as place
from tests.harness.netns import Cluster, cluster_fixture, finish, why_not
from tests.harness.netns import filtered as filtered
from tests.harness.netns import nothing_left as nothing_left
from tests.harness.support import until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

START = 8  # seconds within which an invalid start has to fail


cluster = cluster_fixture(4)
# Two hosts in two networks, one of which has different link names, and a third host in the second network only.
two_networks = cluster_fixture(3, [[0, 1], [0, 1], [1]], ["eth", "ens", "eth"])


def python(*lines):
    head = "import os, signal, sys; rank = int(os.environ['HOROVOD_RANK'])"
    return [sys.executable, "-c", "\n".join((head, *lines))]


READY = "sys.stdout.write(f'ready {rank}\\n'); sys.stdout.flush()"
SPIN = "while True: signal.pause()"


def wait_for(process, pattern, count=1):
    """Read lines of a launcher's output until ``count`` have matched. Returns the matches."""
    found = []
    while len(found) < count:
        line = process.stdout.readline()
        assert line, process.communicate()
        if match := re.search(pattern, line):
            found.append(match)
    return found


def one_line(done):
    """The line that a launcher printed. Checks that it printed nothing else."""
    assert re.fullmatch(r"horovodrun: [^\n]+\n", done.stderr), done.stderr
    assert done.stdout == ""
    return done.stderr.removeprefix("horovodrun: ").rstrip("\n")


# ---- successful jobs -------------------------------------------------------------------------------------------------

COLLECTIVES = program_text("tests/launcher/programs/hosts_collectives.py")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (
            "10.214.0.1,h1:1",
            [(0, 0, 1, 0, 2, "10.214.0.1"), (1, 0, 1, 1, 2, "h1")],
        ),
        (
            "h0:2,h1:2",
            [
                *((0, 0, 2, 0, 2, "h0"), (1, 1, 2, 0, 2, "h0")),
                *((2, 0, 2, 1, 2, "h1"), (3, 1, 2, 1, 2, "h1")),
            ],
        ),
        # The launcher's host has no rank, hosts are given with a user or as addresses, and numbers of ranks differ.
        (
            "root@h2:1,10.214.0.4:2,h1",
            [
                (0, 0, 1, 0, 3, "root@h2"),
                *((1, 0, 2, 1, 3, "10.214.0.4"), (2, 1, 2, 0, 1, "10.214.0.4")),
                (3, 0, 1, 2, 3, "h1"),
            ],
        ),
        (
            "h3:1,h1:1,h0:1,h2:1",
            [(r, 0, 1, r, 4, h) for r, h in enumerate(("h3", "h1", "h0", "h2"))],
        ),
    ],
    ids=["2x1", "2x2", "mixed", "4x1"],
)
@pytest.mark.short
def test_collectives_across_hosts(cluster, hosts, expected):
    done = cluster.launch(0, "-np", len(expected), "-H", hosts, sys.executable, "-c", COLLECTIVES)
    assert (done.returncode, done.stderr) == (0, "")
    rows = sorted(json.loads(line.partition(":")[2]) for line in done.stdout.splitlines())
    assert [tuple(row[:-1]) for row in rows] == expected
    # The hosts on which the ranks ran.
    assert len({row[-1] for row in rows}) == len({row[-2] for row in rows})


# Prints whether a text occurs in the packets of this namespace until the input ends, and whether there were many.
SNIFFER = """
import select, socket, sys
text = sys.argv[1].encode()
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
print("ready", flush=True)
seen = packets = 0
while sock in select.select([sock, sys.stdin], [], [])[0]:
    packet = sock.recv(1 << 17)
    packets += 1
    seen += text in packet
print(seen > 0, packets > 100)
"""
TELLTALE = "a text that only the ranks may read"
TALK = f"""
import numpy as np
import horoplug as hvd
hvd.init()
text = np.frombuffer({TELLTALE.encode()!r} * 10_000, np.uint8)
for _ in range(6):
    assert np.array_equal(hvd.allreduce(text, op=hvd.Max, name={TELLTALE!r}), text)
assert hvd.allgather_object(bytes(text)) == [bytes(text)] * hvd.size()
hvd.shutdown()
"""


@pytest.mark.parametrize("encrypt", [True, False])
def test_traffic_between_hosts_can_be_read_only_without_encryption(cluster, encrypt):
    """The packets are those that a switch between the hosts sees."""
    sniffer = subprocess.Popen(
        ["ip", "netns", "exec", cluster.space("b"), sys.executable, "-c", SNIFFER, TELLTALE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with sniffer:
        assert sniffer.stdout.readline() == "ready\n"
        flags = ["--encrypt"] if encrypt else []
        done = cluster.launch(*(0, "-np", 4, "-H", "h0:2,h1:2", *flags, sys.executable, "-c", TALK))
        assert (done.returncode, done.stderr) == (0, "")
        assert sniffer.communicate(timeout=scaled(60))[0] == f"{not encrypt} True\n"


def test_training_across_hosts(cluster, tmp_path):
    """Training with a hostfile equals training in one process with the gradients of all ranks."""
    pytest.importorskip("torch")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("h0 slots=1 # the first\n\nh1:2\n")
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import horoplug.torch as hvd\n"
        "from tests.harness import training\n"
        "hvd.init()\n"
        "model = training.Model()\n"
        "training.train(training.wrapped(model), model, 5)\n"
        "training.equal(model, training.joined(5), **training.CLOSE)\n"
        "print('trained')\n"
    )
    done = cluster.launch(0, "-np", 3, "-hostfile", hostfile, sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}]<stdout>:trained" for r in range(3)]


@pytest.mark.parametrize("hosts", ["h0,h1", "[fd00:0::1]:1,[fd00:0::2]:1"])
@pytest.mark.short
def test_job_over_ipv6(hosts):
    with Cluster(2, ipv6=True) as cluster:
        command = [sys.executable, "-c", COLLECTIVES]
        done = cluster.launch(0, "-np", 2, "-H", hosts, *command)
        assert (done.returncode, done.stderr) == (0, "")
        cluster.wait_gone()


MPIRUN = {
    "openmpi": [
        *("--prtemca", "plm_ssh_agent", "{rsh}", "--map-by", "ppr:2:node", "--bind-to", "none"),
        *("--mca", "btl_tcp_if_include", "eth0", "-H", "h0:2,h1:2"),
        *("-x", "HOROVOD_CPU_OPERATIONS", "-x", "MPI4PY_LIBMPI"),
    ],
    "mpich": ["-launcher-exec", "{rsh}", "-iface", "eth0", "-hosts", "h0:2,h1:2"],
    "impi": [
        *("-bootstrap-exec", "{rsh}", "-iface", "eth0", "-hosts", "h0,h1", "-ppn", 2),
    ],
}


@pytest.mark.parametrize("way", ["mpi", "gloo"])
def test_mpirun_across_hosts(cluster, place, way):
    """Ranks find each other over MPI and exchange data over MPI or TCP."""
    pytest.importorskip("mpi4py")
    program = """
from mpi4py import MPI
import numpy as np
import horoplug as hvd
from horoplug.common.context import context
hvd.init()
for count in 10, 100_000:
    assert hvd.allreduce(np.ones(count), op=hvd.Sum).tolist() == [4] * count
place = hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
way = "gloo" if context.connections().mpi is None else "mpi"
print(f"{place} on {MPI.Get_processor_name()} {way}\\n", end="", flush=True)
"""
    variables = between_hosts(place.environment()) | {"HOROVOD_CPU_OPERATIONS": way}
    flags = [str(word).format(rsh=cluster.rsh) for word in MPIRUN[place.name]]
    command = [place.mpirun, *flags, "-np", 4, sys.executable, "-c", program]
    code, out, err = finish(cluster.popen(0, *command, env=variables), 60)
    assert code == 0, (out, err)
    expected = {
        f"({rank}, {rank % 2}, 2, {rank // 2}, 2) on h{rank // 2} {way}" for rank in range(4)
    }
    assert set(out.splitlines()) == expected


def test_environment_of_remote_ranks(cluster):
    show = python(
        "wanted = 'PLAIN', 'HOME', 'KEPT_HERE', 'CUDA_VISIBLE_DEVICES', 'SSH_AUTH_SOCK', 'ODD', 'BASH_FUNC_x%%'",
        "print(os.getcwd(), [os.environ.get(name) for name in wanted])",
    )
    odd = "a 'b' \"c\" $d\nü"
    outer = {
        "PLAIN": "1",
        "HOME": "/nowhere",
        "KEPT_HERE": "2",
        "HOROPLUG_FORWARD": "ODD",
        "CUDA_VISIBLE_DEVICES": "3",
        "SSH_AUTH_SOCK": "/nonesuch",
        "ODD": odd,
        "BASH_FUNC_x%%": "() { :; }",
    }
    flags = ["--verbose", "-x", "PLAIN"]
    done = cluster.launch(0, *flags, "-np", 1, "-H", "h1", *show, env=outer)
    home = os.path.expanduser("~root")
    assert done.returncode == 0, done.stderr
    told = ["1", home, None, None, None, odd, None]
    assert done.stdout == f"[0]<stdout>:{os.getcwd()} {told}\n"
    (left_out,) = re.findall("not forwarded to other hosts without -x: (.*)", done.stderr)
    assert "KEPT_HERE" in left_out.split(", ")
    assert not {"PLAIN", "ODD", "HOME", "PATH"} & set(left_out.split(", "))


def test_secret_appears_on_no_command_line(cluster):
    show = python(
        "secret = os.environ['_HOROVOD_SECRET_KEY']",
        "import base64",
        "for name in os.listdir('/proc'):",
        "    if name.isdigit():",
        "        try: text = open(f'/proc/{name}/cmdline').read()",
        "        except OSError: continue",
        "        for one in secret, base64.b64decode(secret).hex(), 'VISIBLE_TO_ALL':",
        "            assert one not in text, name",
        "print('SECRET', secret)",
    )
    show[-1] = show[-1].replace("'VISIBLE_TO_ALL'", "os.environ['TOKEN']")
    done = cluster.launch(
        0,
        "-np",
        2,
        "-H",
        "h0,h1",
        "--verbose",
        "-x",
        "TOKEN",
        *show,
        env={"TOKEN": "hf_" + "x" * 20},
    )
    assert done.returncode == 0, done.stderr
    assert re.search("SECRET (.*)", done.stdout)[1] not in done.stderr


def test_login_shell_output_is_ignored(cluster, tmp_path):
    noisy = wrapper(tmp_path, "echo 'Welcome to this machine!'; echo 'mind the gap' >&2")
    command = python("print(rank)")
    done = cluster.launch(0, "-np", 1, "-H", "h1", "--remote-python", noisy, *command)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0]<stdout>:0\n", "")


def test_large_output_of_remote_ranks_is_complete(cluster):
    count = 30000
    command = python(f"for i in range({count}): print(i)")
    done = cluster.launch(0, "-np", 1, "-H", "h1", *command)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"[0]<stdout>:{i}" for i in range(count)]


# ---- interfaces ------------------------------------------------------------------------------------------------------

ADDRESSES = """
import numpy as np
import psutil
import horoplug as hvd
hvd.init()
assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
found = psutil.Process().net_connections(kind="tcp")
print(sorted({one.laddr.ip for one in found if one.status == psutil.CONN_ESTABLISHED}))
"""


@pytest.mark.parametrize(
    ("flags", "env", "network"),
    [
        ([], {}, 0),
        (["--network-interface", "eth1,ens1"], {}, 1),
        (["--network-interface", "ens1", "--network-interface", "eth1"], {}, 1),
        ([], {"HOROVOD_GLOO_IFACE": "eth1,ens1"}, 1),
    ],
    ids=["found", "list", "twice", "variable"],
)
def test_interfaces_with_different_names(two_networks, flags, env, network):
    """All connections of the ranks, to the launcher and to each other, use the chosen network."""
    done = two_networks.launch(
        0, "-np", 2, "-H", "h0,h1", *flags, sys.executable, "-c", ADDRESSES, env=env
    )
    assert done.returncode == 0, done.stderr
    shown = {f"[{rank}]<stdout>:['10.214.{network}.{rank + 1}']" for rank in range(2)}
    assert set(done.stdout.splitlines()) == shown


def test_common_network_is_used(two_networks):
    done = two_networks.launch(0, "-np", 3, "-H", "h0,h1,h2", sys.executable, "-c", ADDRESSES)
    assert done.returncode == 0, done.stderr
    assert {line.partition(":")[2] for line in done.stdout.splitlines()} == {
        f"['10.214.1.{rank + 1}']" for rank in range(3)
    }


def test_no_common_network():
    with Cluster(3, [[0, 1], [0], [1]]) as cluster:
        text = refused(cluster, "true", hosts="h1,h2")
        assert "no address of this host is reached by all others: " in text
        assert "h1 reaches it at 10.214.0.1; h2 reaches it at 10.214.1.1" in text
        cluster.wait_gone()


def test_host_name_known_only_to_ssh(cluster, tmp_path):
    """The host is an alias in the user's ssh configuration, unknown to the resolvers of both hosts."""
    config = tmp_path / "config"
    own = (cluster.folder / "ssh_config").read_text()
    config.write_text(f"Host worker\n    HostName {cluster.address(2)}\n{own}")
    flags = ["-np", 3, "-H", "h0,worker:2", "--ssh", f"ssh -F {config}"]
    done = cluster.launch(0, *flags, sys.executable, "-c", COLLECTIVES)
    assert (done.returncode, done.stderr) == (0, "")
    rows = sorted(json.loads(line.partition(":")[2]) for line in done.stdout.splitlines())
    assert [row[-2] for row in rows] == ["h0", "worker", "worker"]
    assert len({row[-1] for row in rows}) == 2


# ---- failures before the start ---------------------------------------------------------------------------------------


def wrapper(folder, *lines, last='exec "$python" "$@"'):
    """A script for other hosts that runs commands before Python."""
    script = folder / "python"
    head = f"#!/bin/sh\npython={sys.executable}\n"
    script.write_text(head + "\n".join((*lines, last)) + "\n")
    script.chmod(0o755)
    return script


def refused(cluster, *arguments, hosts="h0,h1", cwd=None, env=None):
    """The error line of a job that must fail to start in time."""
    began = time.monotonic()
    done = cluster.launch(
        0, "-np", len(hosts.split(",")), "-H", hosts, "--start-timeout", START, *arguments, env=env
    )
    assert done.returncode == 1
    assert time.monotonic() - began < START + scaled(15)
    return one_line(done)


@pytest.mark.parametrize(
    ("hosts", "flags", "message"),
    [
        ("h0,nonesuch.invalid", [], "host nonesuch.invalid: .*Could not resolve hostname"),
        ("h0,h1", ["-p", 2222], "host h1: .*port 2222: Connection refused"),
        ("h0,10.214.0.99", [], "host 10.214.0.99: .*(timed out|No route to host)"),
        ("h0,nobody@h1", [], r"host nobody@h1: .*Permission denied \(publickey\)"),
        (
            "h0,h1",
            ["--remote-python", "/nonesuch/python"],
            "host h1: Python cannot be run there: .*/nonesuch/python",
        ),
        (
            "h0,h1",
            ["--network-interface", "eth7"],
            "--network-interface: there is no network interface eth7",
        ),
        (
            "h1,h2",
            ["--network-interface", "eth7"],
            "h[12]: there is no network interface eth7 .*eth0, lo",
        ),
        ("h0,h1", ["--ssh", "/nonesuch/ssh"], "/nonesuch/ssh cannot be run: No such file"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
@pytest.mark.short(failure=True)
def test_unusable_hosts_are_named(cluster, hosts, flags, message):
    assert re.search(message, refused(cluster, *flags, "sleep", 600, hosts=hosts))


def test_changed_host_key_is_refused(cluster, tmp_path):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True
    )
    kind, key, _ = (tmp_path / "key.pub").read_text().split(None, 2)
    known = tmp_path / "known_hosts"
    known.write_text(f"h1 {kind} {key}\n")
    text = refused(cluster, "--ssh", f"{cluster.ssh} -o UserKnownHostsFile={known}", "true")
    assert text.startswith("host h1: Host key verification failed.")


def test_remote_host_without_horoplug(cluster, tmp_path):
    bare = wrapper(tmp_path, "unset PYTHONPATH; cd /", last='exec "$python" -S "$@"')
    text = refused(cluster, "--remote-python", bare, "true")
    assert re.match(
        "host h1: horoplug is not installed for the Python there .*No module named", text
    )


def test_remote_horoplug_without_multi_host_support(cluster, tmp_path):
    package = tmp_path / "horoplug"
    package.mkdir()
    (package / "__init__.py").touch()
    # Without site, because an editable install would still find the rest of the package.
    head, last = f"cd /; export PYTHONPATH={tmp_path}", 'exec "$python" -S "$@"'
    older = wrapper(tmp_path, head, last=last)
    text = refused(cluster, "--remote-python", older, "true")
    assert re.match("host h1: horoplug is older there than on this host .*No module named", text)


def test_remote_horoplug_of_another_version(cluster, tmp_path):
    info = tmp_path / "horoplug-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horoplug\nVersion: 9.9\n")
    # The checkout, which precedes on Python's path, may contain metadata.
    newer = wrapper(tmp_path, f'cd {tmp_path}; export PYTHONPATH="{tmp_path}:$PYTHONPATH"')
    text = refused(cluster, "--remote-python", newer, "true")
    assert re.match(r"h1 has horoplug 9\.9, and this host [\d.]+: all hosts need the same", text)


def test_missing_remote_folder_or_program_is_named(cluster, tmp_path):
    """All hosts share the file system, so that the test removes the folder or program at the right moment."""
    gone = tmp_path / "gone"
    gone.mkdir()
    vanishing = wrapper(tmp_path, f"rmdir {gone} 2>/dev/null")
    process = cluster.popen(
        0,
        *("sh", "-c", 'cd "$0"; exec "$@"', gone, sys.executable, "-m", "horoplug.runner"),
        *("-np", 1, "-H", "h1", "--remote-python", vanishing, "true"),
    )
    code, out, err = finish(process)
    assert (code, out) == (1, "")
    assert err == f"horovodrun: host h1: there is no folder {gone}\n"
    done = cluster.launch(0, "-np", 2, "-H", "h1,h2", "no-such-program")
    assert done.returncode == 126
    assert re.fullmatch(
        "rank [01] could not be started on h[12]: No such file or directory.*", one_line(done)
    )


def test_firewall_at_the_launcher_is_reported(cluster, filtered):
    filtered(0)
    text = refused(cluster, "true")
    assert re.match(
        "h1 does not reach this host at any of its addresses: 10.214.0.1 .no answer", text
    )
    assert "firewalls" in text


def test_firewall_between_hosts_is_reported(cluster, filtered):
    filtered(1)
    text = refused(cluster, "true", hosts="h1,h2")
    assert re.match("h2 does not reach h1 at 10.214.0.2: no answer within .*firewalls", text)


def start_limit():
    """Seconds in which the agent of a host answers."""
    return round(scaled(4))


def test_host_that_hangs_during_the_start_is_named(cluster, tmp_path):
    stuck = wrapper(tmp_path, "exec cat >/dev/null")
    limit = start_limit()
    flags = ["--start-timeout", limit, "--remote-python", stuck]
    text = refused(cluster, *flags, "true", hosts="h0,h1,h2")
    assert text == f"no answer from h1, h2 within {limit} s"


SLOW = """
import socket, sys, time
known = socket.getaddrinfo
def slow(name, *args, **more):
    if name == "nowhere":
        with open(sys.argv[1], "a") as file: file.write("x")
        time.sleep(600)
    return known(name, *args, **more)
socket.getaddrinfo = slow
from horoplug.runner import launch
sys.exit(launch.main(sys.argv[2:]))
"""


def test_unresponsive_resolver_is_reported(cluster, tmp_path):
    """The start timeout includes the time of the resolver, which is asked once and for which ssh waits, too."""
    limit = start_limit()
    flags = ["--start-timeout", limit, "--ssh", "sh -c 'sleep 600'"]
    asked = tmp_path / "asked"
    command = [sys.executable, "-c", SLOW, asked, *flags, "-np", 2, "-H", "h0,nowhere", "true"]
    code, out, err = finish(cluster.popen(0, *command))
    text = f"horovodrun: no answer from nowhere within {limit} s\n"
    assert (code, out, err) == (1, "", text)
    assert asked.read_text() == "x"


def test_host_lost_during_the_start_is_named(cluster, tmp_path):
    """The link of a host goes down after its agent has started."""
    began = tmp_path / "began"
    limit = start_limit()
    slow = wrapper(tmp_path, f'case "$*" in *probe*) touch {began}; sleep {limit};; esac')
    process = cluster.start(
        0, "-np", 2, "-H", "h0,h2", "--start-timeout", limit, "--remote-python", slow, "true"
    )
    until(began.exists)
    cluster.link(2, "down")
    try:
        code, out, err = finish(process)
    finally:
        cluster.link(2, "up")
    assert (code, out, err) == (1, "", f"horovodrun: no answer from h2 within {limit} s\n")


# ---- failures --------------------------------------------------------------------------------------------------------


def test_first_failure_ends_all_hosts(cluster):
    command = python("if rank == 2: sys.exit(7)", SPIN)
    done = cluster.launch(0, "-np", 4, "-H", "h0:2,h1,h2", *command)
    assert done.returncode == 7
    assert one_line(done) == "rank 2 exited with code 7; the other ranks were ended"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_hosts(cluster, number):
    process = cluster.start(0, "-np", 3, "-H", "h0,h1,h2", *python(READY, SPIN))
    wait_for(process, "ready", 3)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert re.fullmatch("horovodrun: (interrupted|terminated); all ranks were ended\n", err)


def test_interrupt_while_a_host_hangs(cluster, tmp_path):
    began = tmp_path / "began"
    stuck = wrapper(tmp_path, f"touch {began}; exec cat >/dev/null")
    process = cluster.start(0, "-np", 2, "-H", "h0,h1", "--remote-python", stuck, "true")
    until(began.exists)
    began_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err) == (130, "horovodrun: interrupted; all ranks were ended\n")
    assert time.monotonic() - began_at < scaled(5)


TREE = [  # a rank with a grandchild and a daemon
    *("sh", "-c"),
    "sleep 600 & (setsid sleep 600 &) ; echo ready; sleep 600; true",
]


def ssh_to(process, host):
    """The ssh process that a launcher has started for a host."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if host in child.cmdline() and child.name() == "ssh":
            return child
    raise AssertionError("no ssh")


def test_remote_ranks_end_when_the_launcher_is_killed(cluster):
    process = cluster.start(0, "-np", 3, "-H", "h0,h1,h2", *TREE)
    wait_for(process, "ready", 3)
    process.kill()
    finish(process)
    cluster.wait_gone()


def test_remote_ranks_end_when_ssh_is_killed(cluster):
    process = cluster.start(0, "-np", 3, "-H", "h0,h1,h2", *TREE)
    wait_for(process, "ready", 3)
    ssh_to(process, "h2").kill()
    code, _, err = finish(process)
    assert code == 1
    assert err == (
        "horovodrun: host h2: the connection was lost: ssh was killed by signal 9 (SIGKILL); "
        "all ranks were ended\n"
    )
    cluster.wait_gone()


def test_job_ends_when_an_agent_is_killed(cluster):
    process = cluster.start(0, "-np", 2, "-H", "h0,h1", *TREE)
    wait_for(process, "ready", 2)
    # The agent's parent, which runs the same program, is not killed.
    agents = [pid for pid, text in cluster.processes().items() if "-c f=open(0" in text]
    (child,) = [pid for pid in agents if psutil.Process(pid).ppid() in agents]
    os.kill(child, signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    why = "the agent was killed by signal 9 (SIGKILL)"
    assert err == f"horovodrun: host h1: the connection was lost: {why}; all ranks were ended\n"
    cluster.wait_gone()


VANISHING = program_text("tests/launcher/programs/hosts_vanishing.py")


def test_lost_host_is_named(cluster, tmp_path):
    """A host's link goes down: every rank gets an error in time that names a rank beyond the link, and no process is
    left."""
    deadline = round(scaled(4))
    flags = ["-np", 4, "-H", "h0,h1,h2:2", "--gloo-timeout-seconds", deadline]
    process = cluster.start(0, *flags, sys.executable, "-c", VANISHING, tmp_path, later=4)
    wait_for(process, "ready", 4)
    cluster.link(2, "down")
    began = time.time()
    try:
        code, _, err = finish(process)
        notes = [tmp_path / f"rank{rank}" for rank in range(4)]
        until(lambda: all(note.exists() and note.read_text() for note in notes))
        cluster.wait_gone(40)
    finally:
        cluster.link(2, "up")
    assert code == 1
    assert re.search(
        r"^horovodrun: host h2: no sign of life for \d+ s; all ranks were ended$", err, re.MULTILINE
    )
    for rank, note in enumerate(notes):
        when, _, text = note.read_text().partition(" ")
        assert float(when) - began < deadline + scaled(6), text
        assert "step" in text
        others = "23" if rank < 2 else "01"
        assert re.search(rf"rank(s \[?|\s)[{others}]", text), text


def test_lost_host_is_named_while_the_job_is_idle(cluster):
    """Both the launcher and the host notice the loss without traffic of ranks."""
    limit = round(scaled(1))
    flags = ["-np", 2, "-H", "h0,h2", "--gloo-timeout-seconds", limit]
    process = cluster.start(0, *flags, *python(READY, SPIN), later=2)
    wait_for(process, "ready", 2)
    cluster.link(2, "down")
    try:
        code, _, err = finish(process)
        assert (code, err) == (
            1,
            f"horovodrun: host h2: no sign of life for {limit + 2} s; all ranks were ended\n",
        )
        cluster.wait_gone()
    finally:
        cluster.link(2, "up")


def test_suspended_launcher_is_not_lost(cluster):
    """The launcher is suspended by Ctrl-Z for longer than the limit of silence."""
    limit = round(scaled(1))
    flags = ["-np", 2, "-H", "h0,h1", "--gloo-timeout-seconds", limit]
    rest = f"time.sleep({limit + 7})"
    command = python(READY, "sys.stdout.flush()", "import time", rest, "print('end')")
    process = cluster.start(0, *flags, *command, later=3)
    wait_for(process, "ready", 2)
    launcher = psutil.Process(process.pid)
    process.send_signal(signal.SIGTSTP)
    until(lambda: launcher.status() == psutil.STATUS_STOPPED)
    time.sleep(limit + 4.5)  # it is the time itself that is tested
    process.send_signal(signal.SIGCONT)
    code, out, err = finish(process)
    assert (code, err) == (0, ""), err
    assert out.count("end") == 2


def test_launcher_with_blocked_output_is_not_lost(cluster):
    """The launcher is blocked in a write, as with a pager. Neither the hosts nor the launcher may count the other as
    lost."""
    limit = round(scaled(1))
    flags = ["-np", 1, "-H", "h1", "--gloo-timeout-seconds", limit]
    process = cluster.start(0, *flags, "yes", later=3)
    wait_for(process, "y")
    time.sleep(limit + 4.5)  # it is the time itself that is tested
    assert any(text.startswith("yes") for text in cluster.processes().values())
    for _ in range(100_000):
        assert process.stdout.readline() == "[0]<stdout>:y\n"
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err) == (130, "horovodrun: interrupted; all ranks were ended\n")


@pytest.mark.parametrize("algorithm", ["hierarchical", "ring"])
def test_algorithms_between_hosts(cluster, algorithm):
    command = [sys.executable, "-c", COLLECTIVES]
    env = {"HOROPLUG_ALGORITHM": algorithm, "HOROPLUG_NUM_STREAMS": "2"}
    done = cluster.launch(0, "-np", 3, "-H", "h0:1,h1:2", *command, env=env)
    assert (done.returncode, done.stderr) == (0, "")
