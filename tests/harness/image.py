"""The images of the Dockerfile for tests: its steps, run in a root file system that is removed afterwards.

    with Image("runtime", "sshd") as image:
        image.run("python", "-c", "import horoplug")

The root file system is an overlay over this machine's own one, which therefore does not change. Debian's packages are
those of this machine; ``make test-image`` runs the same steps in a bare Debian. Needs root."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.harness import ROOT
from tests.harness.limits import scaled

STEPS = ROOT / "scripts" / "image-steps"
USER = 1000
ENVIRONMENT = {"PATH": "/opt/horoplug/bin:/usr/local/bin:/usr/bin:/bin"}  # ENV of the Dockerfile
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# For a step: Debian's programs, and packages from where this machine has them.
_OF_STEPS = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
_OF_PIP = ("PIP_", "REQUESTS_CA_BUNDLE", "SSL_CERT", "http", "HTTP", "no_proxy", "NO_PROXY")

# Holds the root file system, which is in memory and which only processes in this one's namespace see: FOLDER LOWER.
HOLD = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=0755 tmpfs "$1"
cd "$1"
mkdir root upper work
mount -t overlay overlay -o lowerdir="$2",upperdir=upper,workdir=work root
echo ready
exec sleep infinity
"""
# Runs a container: ROOT USER COMMAND... $MOUNTS is a script with further mounts. They end with the container, which
# does not see the checkout.
ENTER = f"""
set -e
root=$1 user=$2
shift 2
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
[ ! -d "$root{ROOT}" ] || mount -t tmpfs -o mode=0700 tmpfs "$root{ROOT}"
eval "$MOUNTS"
exec chroot --userspec="$user:$user" --groups="$user" "$root" "$@"
"""


@functools.cache
def why_not() -> str:
    """Why the images cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "needs root, for a chroot"
    found = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys, ensurepip; print(*sys.version_info[:2])"],
        capture_output=True,
        text=True,
    )
    if found.stdout.split() != [*map(str, sys.version_info[:2])]:
        return "needs Debian's Python, in the version for which horoplug is built"
    try:
        with Image() as probe:
            probe.run("true", user=0)
    except (OSError, AssertionError) as error:
        return f"no root file system for images: {error}"
    return ""


class Image:
    """The root file system that the steps of an image make, in this order: ``runtime``, ``sshd``, ``example``.

    All containers share it. Their user can write only to its home folder."""

    def __init__(self, *steps: str, system: Path = Path("/"), wheel: Path | None = None) -> None:
        """``system``: another root file system than this machine's; ``wheel``: instead of :func:`quick_wheel`."""
        self.steps = steps
        self.system = system
        self.wheel = wheel
        self.folder = Path(tempfile.mkdtemp(prefix="hpimage"))
        (self.folder / "system").mkdir()
        self._holder: subprocess.Popen[str] | None = None

    @property
    def root(self) -> Path:
        return self.folder / "system" / "root"

    def __enter__(self) -> Image:
        try:
            self._holder = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", HOLD, "sh", self.folder / "system", self.system],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert self._holder.stdout
            said = self._holder.stdout.readline()
            assert said == "ready\n", said.strip()
            if self.steps:
                self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the image. Idempotent."""
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate(timeout=scaled(10))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self) -> None:
        files = self.folder / "files"  # what the Dockerfile mounts for its steps
        files.mkdir()
        for file in (STEPS, ROOT / "examples" / "pytorch" / "train.py"):
            shutil.copy(file, files)
        wheel = Path(shutil.copy(self.wheel, files)) if self.wheel else quick_wheel(files)
        for name in ("passwd", "group"):  # a bare Debian has no users
            lines = (self.system / "etc" / name).read_text().splitlines(keepends=True)
            bare = [line for line in lines if not 1000 <= int(line.split(":")[2]) < 60000]
            (files / name).write_text("".join(bare))
        there = self.root / "files"
        mounts = f"mkdir -p {there}; mount --bind {files} {there}"
        if self.system != Path("/"):  # it can reach the network as this machine does
            names = self.root / "etc/resolv.conf"
            mounts += f"; touch {names}; mount --bind /etc/resolv.conf {names}"
            shutil.copy(CERTIFICATES, files / "certificates")
        self.run("cp", "/files/passwd", "/files/group", "/etc", user=0, mounts=mounts)
        for step in self.steps:
            given = [f"/files/{wheel.name}"] if step == "runtime" else []
            self.run(f"/files/{STEPS.name}", step, *given, user=0, mounts=mounts)

    def enter(
        self, command: list[str], variables: dict[str, str], user: int, network: str | None = None
    ) -> list[str]:
        """The command line that runs a command in a container with namespaces of its own for processes, mounts and
        host name, and with exactly these variables. It needs ``MOUNTS`` in its environment. ``network``: the path of a
        network namespace. The container ends with its first process, which is the child of the command line's."""
        assert self._holder is not None
        spaces = [f"--mount=/proc/{self._holder.pid}/ns/mnt"]
        spaces += [f"--net={network}"] if network else []
        words = ["nsenter", *spaces, "unshare", "--mount", "--uts", "--pid", "--fork"]
        words += ["--kill-child", "sh", "-c", ENTER, "sh", str(self.root), str(user)]
        given = [f"{name}={text}" for name, text in variables.items()]
        return [*words, "/usr/bin/env", "-i", *given, *command]

    def run(
        self,
        *command: str,
        user: int = USER,
        mounts: str = "",
        check: bool = True,
        timeout: float = 150,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the image. ``user`` 0: as a step of the build, whose files stay in the image. ``mounts``: a
        script with further mounts."""
        variables = ENVIRONMENT | {"HOME": "/home/horoplug"}
        if user == 0:
            pip = {name: text for name, text in os.environ.items() if name.startswith(_OF_PIP)}
            variables = _OF_STEPS | pip
            if self.system != Path("/"):
                for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
                    variables[name] = "/files/certificates"
        done = subprocess.run(
            self.enter([*command], variables, user),
            env=os.environ | {"MOUNTS": mounts},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(timeout),
        )
        assert not check or done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
        return done


def quick_wheel(folder: Path) -> Path:
    """A wheel of the checkout as it is built, without a build. test_packaging.py tests the one that pip makes."""
    prepare = f"from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", prepare], cwd=ROOT, check=True, capture_output=True)
    (information,) = folder.glob("*.dist-info")
    kinds = ("*.py", "*.pyi", "*.so", "py.typed")
    found = {file for kind in kinds for file in (ROOT / "horoplug").rglob(kind)}
    packed = {str(file.relative_to(ROOT)): file for file in found}
    packed |= {
        f"{information.name}/{file.name}": file for file in information.iterdir() if file.is_file()
    }
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    wheel = (
        folder
        / f"{information.name.removesuffix('.dist-info')}-{tag}-{tag}-linux_{os.uname().machine}.whl"
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, file in packed.items():
            archive.write(file, name)
        text = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}-{tag}-linux_{os.uname().machine}\n"
        archive.writestr(f"{information.name}/WHEEL", text)
        names = [*packed, f"{information.name}/WHEEL", f"{information.name}/RECORD"]
        archive.writestr(f"{information.name}/RECORD", "".join(f"{name},,\n" for name in names))
    shutil.rmtree(information)
    return wheel
