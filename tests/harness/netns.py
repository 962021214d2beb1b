"""Hosts for tests: network namespaces of this machine, connected by bridges, each with its own sshd.

    with Cluster(3) as cluster:
        cluster.launch(0, "-np", 3, "-H", "h0,h1,h2", "python", "train.py")

Host ``h1`` has the address 10.214.0.2 in network 0, under which all others reach it. A host has a link to each of its
networks. Needs root, iproute2 and OpenSSH's server."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.limits import scaled
from tests.harness.support import environment, until

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
_BECOME_HOST = (
    'hostname "$0" && { [ ! -f ~/.bashrc ] || mount --bind /dev/null ~/.bashrc; } && exec "$@"'
)
MARK = "HOROPLUG_TEST_CLUSTER"
CONFIG = """
Port 22
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
StrictModes no
UsePAM no
UseDNS no
MaxStartups 100
"""
HURRIED = "import sys; from horoplug.runner.job import job; from horoplug.runner import launch"
CLIENT = """
Host *
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile none
"""


@functools.cache
def why_not() -> str:
    """Why this machine cannot have such hosts; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    if SSHD is None or shutil.which("ssh") is None:
        return "needs OpenSSH's client and server (openssh-server)"
    name = f"hpprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"the kernel refuses network namespaces: {made.stderr.strip()}"
    link = ["ip", "-n", name, "link", "add", "br0", "type"]
    try:
        for kind in (["veth", "peer", "name", "br1"], ["bridge"]):
            made = subprocess.run([*link, *kind], capture_output=True, text=True)
            if made.returncode:
                return f"the kernel refuses {kind[0]} devices: {made.stderr.strip()}"
            subprocess.run(["ip", "-n", name, "link", "del", "br0"], capture_output=True)
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return ""


class Cluster:
    """A number of hosts, ``h0``, ``h1`` and so on. ``networks``: the networks of each host; ``devices``: the prefix of
    each host's link names, by default ``eth``; ``ipv6``: the hosts have IPv6 addresses only; ``names``: other host
    names."""

    def __init__(
        self,
        hosts: int,
        networks: Sequence[Sequence[int]] | None = None,
        devices: Sequence[str] | None = None,
        ipv6: bool = False,
        names: Sequence[str] | None = None,
    ) -> None:
        self.ipv6 = ipv6
        self.names = list(names or [f"h{i}" for i in range(hosts)])
        self.networks = [list(one) for one in networks or [[0]] * hosts]
        self.devices = list(devices or ["eth"] * hosts)
        self.prefix = f"hpt{secrets.token_hex(4)}"
        self.folder = Path(tempfile.mkdtemp(prefix="hpcluster"))
        self.mark = secrets.token_hex(8)
        self._servers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- creation ----------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        bridge = self.space("b")
        ip("netns", "add", bridge)
        for network in {n for one in self.networks for n in one}:
            ip("-n", bridge, "link", "add", f"br{network}", "type", "bridge")
            ip("-n", bridge, "link", "set", f"br{network}", "up")
        known = ["127.0.0.1 localhost"]
        for i, name in enumerate(self.names):
            known += [f"{self.address(i, network)} {name}" for network in self.networks[i][:1]]
        for i, name in enumerate(self.names):
            space = self.space(name)
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            for network in self.networks[i]:
                port = f"p{i}n{network}"
                device = self.device(i, network)
                ip(
                    *("-n", space, "link", "add", device, "type", "veth"),
                    *("peer", "name", port, "netns", bridge),
                )
                ip("-n", bridge, "link", "set", port, "master", f"br{network}", "up")
                address = [f"{self.address(i, network)}/24", "dev", device]
                if self.ipv6:  # without duplicate address detection, which takes time
                    address = [f"{self.address(i, network)}/64", "dev", device, "nodad"]
                ip("-n", space, "addr", "add", *address)
                ip("-n", space, "link", "set", device, "up")
            etc = Path("/etc/netns", space)
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("\n".join(known) + "\n")
        self._keys()
        for i in range(len(self.names)):
            self._serve(i)

    def _keys(self) -> None:
        for key in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        (self.folder / "sshd_config").write_text(CONFIG.format(folder=self.folder))
        (self.folder / "ssh_config").write_text(CLIENT.format(folder=self.folder))
        self.rsh.write_text(
            f'#!/bin/sh\nexec {self.ssh} -o StrictHostKeyChecking=accept-new "$@"\n'
        )
        self.rsh.chmod(0o755)

    def _serve(self, host: int) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        log = (self.folder / f"sshd{host}.log").open("wb")
        with log:
            server = subprocess.Popen(
                # The host also gets its own host name, and an empty ~/.bashrc (ip has given it its own mounts): bash
                # reads that file for each ssh, and programs that it starts, such as pyenv's, take 0.1 s.
                [
                    *("ip", "netns", "exec", self.space(self.names[host]), "unshare", "--uts"),
                    *("sh", "-c", _BECOME_HOST, self.names[host]),
                    *(SSHD, "-D", "-e", "-f", self.folder / "sshd_config"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._servers.append(server)
        until(lambda: b"Server listening" in (self.folder / f"sshd{host}.log").read_bytes())

    # ---- use ---------------------------------------------------------------------------------------------------------

    def space(self, name: str) -> str:
        """The network namespace of a host."""
        return f"{self.prefix}{name}"

    def address(self, host: int, network: int = 0) -> str:
        return f"fd00:{network}::{host + 1}" if self.ipv6 else f"10.214.{network}.{host + 1}"

    def device(self, host: int, network: int = 0) -> str:
        return f"{self.devices[host]}{network}"

    def inside(self, host: int) -> list[str]:
        """The prefix of a command that runs on a host."""
        spaces = ["--net", "--uts", "--mount", f"--wd={os.getcwd()}"]
        return ["nsenter", "-t", str(self._servers[host].pid), *spaces]

    @property
    def ssh(self) -> str:
        """The ssh command with this cluster's keys and without the user's settings."""
        return f"ssh -F {self.folder}/ssh_config"

    @property
    def rsh(self) -> Path:
        """A script that runs :meth:`ssh`, for mpirun."""
        return self.folder / "ssh"

    def start(
        self,
        host: int,
        *arguments: object,
        env: dict[str, str] | None = None,
        later: float | None = None,
    ) -> subprocess.Popen[str]:
        """Start horovodrun on a host. ``later``: seconds after the ranks' timeout at which a silent host is lost."""
        program = ["-m", "horoplug.runner"]
        if later is not None:
            program = ["-c", f"{HURRIED}; job._LATER = {later}; sys.exit(launch.main())"]
        return self.popen(host, sys.executable, *program, *arguments, env=env)

    def popen(
        self, host: int, *command: object, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        variables = environment() | {"HOROPLUG_SSH": self.ssh, MARK: self.mark}
        return subprocess.Popen(
            [*self.inside(host), *map(str, command)],
            env=variables | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def launch(
        self, host: int, *arguments: object, timeout: float = 60, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run horovodrun on a host and wait for its end."""
        process = self.start(host, *arguments, env=env)
        return subprocess.CompletedProcess(process.args, *finish(process, timeout))

    def link(self, host: int, state: str, network: int = 0) -> None:
        """Set a host's link ``up`` or ``down``."""
        ip(*("-n", self.space(self.names[host]), "link", "set"), self.device(host, network), state)

    def processes(self, servers: bool = False) -> dict[int, str]:
        """The command lines of the hosts' processes by pid. Omits ssh servers, which may not have noticed yet that a
        client is gone whose link is down."""
        found = {}
        for name in self.names:
            listed = subprocess.run(
                ["ip", "netns", "pids", self.space(name)], capture_output=True, text=True
            )
            for pid in map(int, listed.stdout.split()):
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if text and (servers or not text.startswith(("sshd:", SSHD))):  # zombies: ""
                        found[pid] = text
        return found

    def wait_gone(self, timeout: float = 20) -> None:
        """Wait until only the ssh servers run on the hosts."""
        deadline = time.monotonic() + scaled(timeout)
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def close(self) -> None:
        """Remove everything, also after an incomplete creation. Idempotent."""
        for server in self._servers:
            server.terminate()
            server.wait(scaled(10))
        deadline = time.monotonic() + 5
        while (
            self._servers and (left := self.processes(servers=True)) and time.monotonic() < deadline
        ):
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)
        self._servers.clear()
        for name in (*self.names, "b"):
            subprocess.run(["ip", "netns", "delete", self.space(name)], capture_output=True)
            shutil.rmtree(Path("/etc/netns", self.space(name)), ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()
        shutil.rmtree(self.folder, ignore_errors=True)


def cluster_fixture(*arguments: Any) -> Any:
    """A cluster for all tests of a module; the arguments are those of :class:`Cluster`."""

    @pytest.fixture(scope="module")
    def cluster() -> Iterator[Cluster]:
        with Cluster(*arguments) as made:
            yield made

    return cluster


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a test leaves no process on its hosts. Applies to all tests of a module that imports this fixture."""
    yield
    for made in request.node.funcargs.values():
        if isinstance(made, Cluster):
            made.wait_gone()


@pytest.fixture
def filtered(cluster: Cluster) -> Iterator[Callable[[int], None]]:
    """A function that adds a firewall to a host, which accepts new connections of ssh only."""
    if shutil.which("iptables", path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
        pytest.skip("needs iptables")
    rule = ["INPUT", "!", "-i", "lo", "-p", "tcp", "--syn", "--dport", "1024:65535", "-j", "DROP"]
    hosts = []

    def block(host: int) -> None:
        subprocess.run([*cluster.inside(host), "iptables", "-A", *rule], check=True)
        hosts.append(host)

    yield block
    for host in hosts:
        subprocess.run([*cluster.inside(host), "iptables", "-D", *rule], check=True)


def finish(process: subprocess.Popen[str], timeout: float = 40) -> tuple[int, str, str]:
    """Wait for a launcher's end: its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=scaled(timeout))
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=scaled(30))
        pytest.fail(f"not done after {timeout:g} s:\n{out}\n{err}", pytrace=False)
    return process.returncode, out, err


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
