"""Kubernetes' pods for tests: containers of an :class:`~tests.harness.image.Image` in a network of their own.

    with Pods(image) as pods:
        pod = pods.start(pod_spec, name="train-0", subdomain="train", env={"JOB_COMPLETION_INDEX": "0"})
        status, output = pod.wait()

A pod gets what Kubernetes gives it: its user, its variables, its volumes, its host name, and the names of all pods.
These names lead to other addresses when a pod comes back. The part of the operators is in operators.py, ray_pods.py and
spark_pods.py."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.harness import image as images
from tests.harness.limits import scaled
from tests.harness.netns import ip
from tests.harness.support import until

NAMESPACE = "research"  # of Kubernetes
# Kubernetes sets them in every container.
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
SECRETS = {"horoplug": {"key": secrets.token_hex()}}  # docs/launch-kubernetes.md creates it
_CLONE_NEWNET = 0x40000000
_HOSTS_BYTES = 4096  # the length of /etc/hosts: one page of memory
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def quantity(text: str) -> int:
    """An amount of memory, as Kubernetes writes it, in bytes."""
    found = re.fullmatch(r"(\d+)(\w*)", text)
    assert found, text
    return int(found[1]) * _UNITS[found[2]]


def why_not() -> str:
    """Why this machine cannot have such pods; empty if it can."""
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    return images.why_not()


class Pod:
    """A running pod. :attr:`lines` has what it prints, on both streams."""

    def __init__(self, name: str, address: str, space: str, folder: Path) -> None:
        self.name, self.address, self.space, self.folder = name, address, space, folder
        self.lines: list[str] = []

    def begin(self, command: list[str], mounts: str) -> None:
        self._process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self.space}", *command],
            env=os.environ | {"MOUNTS": mounts},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout:
            for line in self._process.stdout:
                self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_for(self, text: str, timeout: float = 40) -> None:
        """Wait until the pod has printed a text."""
        deadline = time.monotonic() + scaled(timeout)
        while text not in self.text:
            assert time.monotonic() < deadline, f"no {text!r} after {timeout} s:\n{self.text}"
            assert self.is_running, f"no {text!r}:\n{self.text}"
            time.sleep(0.01)

    def wait(self, timeout: float = 40) -> tuple[int, str]:
        """Wait for the end: the exit code of the command, and what it has printed."""
        try:
            code = self._process.wait(scaled(timeout))
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name}: not done after {timeout:g} s:\n{self.text}"
            ) from None
        self._reader.join(scaled(10))
        return code, self.text

    def execute(
        self, command: list[str], variables: Mapping[str, str], user: int, timeout: float = 90
    ) -> tuple[int, str]:
        """Run a further command in the running pod, as a user and with exactly these variables. Returns the exit code
        and what the command has printed."""
        (first,) = psutil.Process(self._process.pid).children()
        spaces = ["--mount", "--uts", "--pid", "--net", "--root", "--wd"]
        owner = [f"--setuid={user}", f"--setgid={user}"]
        given = [f"{name}={text}" for name, text in variables.items()]
        entering = ["nsenter", f"--target={first.pid}", *spaces, *owner, "env", "-i", *given]
        with tempfile.TemporaryFile("w+") as printed:
            try:
                code = subprocess.run(
                    [*entering, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    timeout=scaled(timeout),
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
            printed.seek(0)
            text = printed.read()
        assert code is not None, f"{self.name}: {command} not done after {timeout:g} s:\n{text}"
        return code, text

    def kill(self) -> None:
        """End all processes of the pod by SIGKILL, and take its network away. Idempotent."""
        # The child of unshare is process 1 of the pod's namespace, which ends with it.
        with contextlib.suppress(psutil.NoSuchProcess):
            for first in psutil.Process(self._process.pid).children():
                first.kill()
        self._process.wait(scaled(10))
        self._reader.join(scaled(10))
        subprocess.run(["ip", "netns", "delete", self.space], capture_output=True)


class Pods:
    """The pods of one namespace, in one network. ``files``: further files of the image, by their paths; ``home``: the
    home folder of the image's user; ``config_maps``: the data of the namespace's ConfigMaps, by their names."""

    def __init__(
        self,
        image: images.Image,
        files: Mapping[str, str] = {},
        home: str = "/home/horoplug",
        config_maps: Mapping[str, Mapping[str, str]] = {},
    ) -> None:
        self.image = image
        self.home = home
        self.config_maps = dict(config_maps)
        self.prefix = f"hpk{secrets.token_hex(4)}"
        self.folder = Path(tempfile.mkdtemp(prefix="hppods"))
        self.folder.chmod(0o755)
        self.pods: dict[str, Pod] = {}
        self._started = 0
        self._known: dict[str, str] = {}
        self._files = {path: self.folder / Path(path).name for path in files}
        for path, text in files.items():
            self._files[path].write_text(text)
        self._hosts = self.folder / "hosts"
        self._bridge = f"{self.prefix}b"

    def __enter__(self) -> Pods:
        try:
            ip("netns", "add", self._bridge)
            ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
            ip("-n", self._bridge, "link", "set", "br0", "up")
            self._publish()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all pods and remove everything. Idempotent."""
        for pod in self.pods.values():
            pod.kill()
        subprocess.run(["ip", "netns", "delete", self._bridge], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self,
        spec: Mapping[str, Any],
        *,
        name: str,
        env: Mapping[str, str],
        subdomain: str = "",
        names: tuple[str, ...] = (),
        mounts: Mapping[str, Path] = {},
    ) -> Pod:
        """Start the first container of a pod's specification.

        ``env``: the variables that the operator adds; ``subdomain``: the headless service under which the pod has a
        name; ``names``: names of services that lead to it; ``mounts``: files and folders that the operator mounts."""
        container = spec["containers"][0]
        user = spec["securityContext"]["runAsUser"]
        assert spec["securityContext"]["runAsNonRoot"]
        self._started += 1
        pod = Pod(
            name,
            f"10.244.0.{self._started}",
            f"{self.prefix}{self._started}",
            self.folder / str(self._started),
        )
        pod.folder.mkdir()
        fields = {"status.podIP": pod.address, "metadata.name": name}
        given = {
            entry["name"]: entry["value"]
            if "valueFrom" not in entry
            else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for entry in container.get("env", ())
        }
        variables = images.ENVIRONMENT | {"HOME": self.home, "HOSTNAME": name}
        variables |= KUBERNETES | given | env
        self._link(pod)
        if subdomain:
            names += (f"{name}.{subdomain}", f"{name}.{subdomain}.{NAMESPACE}.svc")
        self._known = {known: a for known, a in self._known.items() if known not in names}
        self._known |= dict.fromkeys(names, pod.address)
        self._publish()
        words = [*container["command"], *container.get("args", ())]
        pod.begin(
            self.image.enter(words, variables, user, f"/run/netns/{pod.space}"),
            "\n".join(self._mounts(spec, container, pod, mounts)),
        )
        self.pods[name] = pod
        return pod

    def _mounts(
        self,
        spec: Mapping[str, Any],
        container: Mapping[str, Any],
        pod: Pod,
        more: Mapping[str, Path],
    ) -> list[str]:
        """The commands that mount a pod's volumes and set its host name."""
        root, owner = self.image.root, spec["securityContext"]
        home = f"uid={owner['runAsUser']},gid={owner['runAsGroup']},mode=0700"
        lines = [
            f"hostname {pod.name}",
            f"mount -t tmpfs -o size=64m tmpfs {root}/dev/shm",  # the size that container runtimes give
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",
            f"mount -t tmpfs -o {home} tmpfs {root}{self.home}",
            f"mount --bind {self._hosts} {root}/etc/hosts",
        ]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        found = self._files | dict(more)
        for mount in container.get("volumeMounts", ()):
            volume = volumes[mount["name"]]
            if "emptyDir" in volume:
                size = quantity(volume["emptyDir"].get("sizeLimit", "0"))  # 0: no limit
                there = shlex.quote(f"{root}{mount['mountPath']}")
                lines += [
                    f"mkdir -p {there}",
                    f"mount -t tmpfs -o size={size},mode=1777 tmpfs {there}",
                ]
                continue
            folder = pod.folder / mount["name"]
            folder.mkdir()
            if "configMap" in volume:
                data, mode = self.config_maps[volume["configMap"]["name"]], 0o644
            else:
                secret = volume["secret"]
                data, mode = SECRETS[secret["secretName"]], secret["defaultMode"]
            for key, text in data.items():
                (folder / key).write_text(text)
                (folder / key).chmod(mode)
                os.chown(folder / key, 0, owner["fsGroup"])
            found[mount["mountPath"]] = folder
        limits = container.get("resources", {}).get("limits", {})
        if "memory" in limits:
            found["/sys/fs/cgroup"] = folder = pod.folder / "cgroup"
            folder.mkdir()
            (folder / "memory.max").write_text(f"{quantity(limits['memory'])}\n")
            (folder / "memory.current").write_text("0\n")
            (folder / "memory.stat").write_text("anon 0\ninactive_file 0\nactive_file 0\n")
        for path, source in found.items():
            there = shlex.quote(f"{root}{path}")
            make = "mkdir -p" if source.is_dir() else "touch"
            lines += [f"{make} {there}", f"mount --bind {source} {there}"]
        return lines

    def _link(self, pod: Pod) -> None:
        ip("netns", "add", pod.space)
        ip("-n", pod.space, "link", "set", "lo", "up")
        link = ["type", "veth", "peer", "name", f"p{self._started}", "netns", self._bridge]
        ip("-n", pod.space, "link", "add", "eth0", *link)
        ip("-n", self._bridge, "link", "set", f"p{self._started}", "master", "br0", "up")
        ip("-n", pod.space, "addr", "add", f"{pod.address}/24", "dev", "eth0")
        ip("-n", pod.space, "link", "set", "eth0", "up")

    def _publish(self) -> None:
        """Write the names, as Kubernetes' DNS does. The pods see the same file, so it is changed in place: by one write
        of always the same length, so that a pod that looks up a name meanwhile never finds an empty file."""
        lines = ["127.0.0.1 localhost", *(f"{a} {name}" for name, a in self._known.items())]
        text = "\n".join(lines).encode()
        assert len(text) < _HOSTS_BYTES
        file = os.open(self._hosts, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(file, text.ljust(_HOSTS_BYTES, b"\n"), 0)
        os.close(file)

    def listen(self, port: int, names: tuple[str, ...]) -> socket.socket:
        """A listening socket of this process in the pods' network, where these names lead to it."""
        address = "10.244.0.254"
        ip("-n", self._bridge, "addr", "add", f"{address}/24", "dev", "br0")
        self._known |= dict.fromkeys(names, address)
        self._publish()
        # A socket belongs to the network namespace of the thread that has created it.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_listen_in, self._bridge, address, port).result()

    def evict(self, pod: Pod) -> None:
        """Evict a pod: its processes are killed, and its names lead nowhere until another one is started."""
        pod.kill()
        self._known = {name: a for name, a in self._known.items() if a != pod.address}
        self._publish()
        del self.pods[pod.name]

    def listening(self, pod: Pod, port: int, timeout: float = 20) -> None:
        """Wait until a pod's readiness probe succeeds: a process listens on this port."""
        hexadecimal = f":{port:04X} "

        def ready() -> bool:
            assert pod.is_running, pod.text
            found = subprocess.run(
                ["ip", "netns", "exec", pod.space, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
                capture_output=True,
                text=True,
            )
            return any(hexadecimal in line and " 0A " in line for line in found.stdout.splitlines())

        until(ready, timeout)


def _listen_in(space: str, address: str, port: int) -> socket.socket:
    with Path("/run/netns", space).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    return socket.create_server((address, port))
