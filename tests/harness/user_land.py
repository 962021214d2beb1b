"""Other user lands for tests of the wheels: root file systems of Debian's releases, also of another architecture.

    with UserLand("bullseye") as old:
        old.run("/usr/bin/python3", "--version")

debootstrap makes them, in ``build/user-lands``, where they stay for the next time. Processes of another architecture
run under qemu-user, which the kernel calls for their programs (binfmt_misc). Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.harness import ROOT
from tests.harness.limits import scaled

MIRROR = "http://deb.debian.org/debian"
FOLDER = ROOT / "build" / "user-lands"
EMULATOR = Path("/usr/bin/qemu-aarch64-static")
HANDLERS = Path("/proc/sys/fs/binfmt_misc")
# The first bytes of a program for aarch64 and which of their bits count. F: the emulator is opened now, so that it is
# found in any root file system.
_MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
_ENTER = """
set -e
root=$1
shift
mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs tmpfs dev/shm
mount -t tmpfs -o mode=1777 tmpfs tmp
for folder in $SHARED; do mkdir -p "$root$folder"; mount --bind "$folder" "$root$folder"; done
exec chroot "$root" "$@"
"""


def _emulate() -> None:
    if not (HANDLERS / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "none", HANDLERS], check=True)
    if not (HANDLERS / "qemu-aarch64").exists():
        (HANDLERS / "register").write_text(f":qemu-aarch64:M::{_MAGIC}:{_MASK}:{EMULATOR}:F")


class UserLand:
    """A release of Debian, ``suite``, for an architecture by Debian's name, with some packages."""

    def __init__(self, suite: str, architecture: str = "amd64", packages: tuple[str, ...] = ()):
        self.root = FOLDER / f"{suite}-{architecture}"
        if architecture == "arm64" and os.uname().machine != "aarch64":
            _emulate()
        if (self.root / ".made").exists():
            return
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        options = ["--variant=minbase", f"--arch={architecture}"]
        options += [f"--include={','.join(packages)}"] if packages else []
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        made = subprocess.run(
            ["debootstrap", *options, suite, self.root, MIRROR],
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=scaled(900),
        )
        assert made.returncode == 0, made.stdout[-2000:] + made.stderr
        (self.root / ".made").touch()

    def run(
        self,
        *command: str | Path,
        shared: tuple[Path, ...] = (),
        timeout: float = 600,
        check: bool = True,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, which sees the folders ``shared`` of this machine under the same paths, and whose processes
        all end with it."""
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, "sh"]
        given = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "SHARED": " ".join(map(str, shared)),
        }
        done = subprocess.run(
            [*words, self.root, *command],
            env=given | variables,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(timeout),
        )
        said = f"{command}: {done.returncode}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
        assert not check or done.returncode == 0, said
        return done
