"""An image for pods with Ray or Spark, as rayproject/ray and apache/spark with horoplug installed.

    with cluster_image("ray", 1000) as image, Pods(image, home="/home/ray") as pods:
        pods.start(spec, name="train", env=ENVIRONMENT, mounts=mounts())

Nothing is installed: the pods see this machine's Debian, and the folders of the checkout and of its Python environment
that they need, under other paths."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tests.harness import ROOT, pods
from tests.harness.image import Image

CLUSTERS = ROOT / "build" / "clusters"  # requirements/clusters.txt
_PACKAGES = "/opt/packages"
# ENV of the image, and what conftest.py sets to save time.
ENVIRONMENT = {
    "PATH": "/opt/bin:/usr/bin:/bin",
    "PYTHONPATH": f"/opt/job:/opt/clusters:{_PACKAGES}",
    "PYTHONDONTWRITEBYTECODE": "1",
    **{
        name: text
        for name, text in os.environ.items()
        if name in ("OPENBLAS_NUM_THREADS", "TEST_GC_THRESHOLD")
    },
}
# NAME NUMBER HOME PTH: makes a user and its home folder, the programs that the image has besides Debian's, and the .pth
# file of the tests' Python, which conftest.py explains.
_MAKE = """
set -e
users=$(grep -v -E ":x:$2:" /etc/passwd)
printf '%s\\n' "$users" "$1:x:$2:$2::$3:/bin/bash" >/etc/passwd
mkdir -p "$3" /opt/bin /workspace
ln -s /usr/bin/python3 /opt/bin/python
cat >/opt/bin/ray <<'END'
#!/usr/bin/python3
import sys
from ray.scripts.scripts import main
sys.exit(main())
END
chmod 755 /opt/bin/ray
printf %s "$4" >/usr/lib/python3/dist-packages/tests.pth
"""

# The training program of the tests.
JOB = """
import socket
import numpy as np
import horoplug as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
large = hvd.allreduce(np.full(1 << 20, rank, np.float32), op=hvd.Sum)
assert (large == size * (size - 1) // 2).all()
host = f"{hvd.cross_rank()} of {hvd.cross_size()}, {socket.gethostname()},"
print(f"rank {rank} of {size} on {host} is done")
"""


def finished(text: str) -> list[tuple[int, int, int, int, str]]:
    """What ranks of :data:`JOB` have printed: rank, size, host, number of hosts, name of the pod."""
    found = re.findall(r"rank (\d+) of (\d+) on (\d+) of (\d+), (\S+), is done", text)
    return sorted((*map(int, numbers), pod) for *numbers, pod in found)


def why_not(module: str) -> str:
    """Why there is no such image here; empty if there is. ``module``: what it needs of requirements/clusters.txt."""
    if not (CLUSTERS / module).exists():
        return f"needs {module} in build/clusters (make build/clusters/.installed)"
    return pods.why_not()


@contextlib.contextmanager
def cluster_image(user: str, number: int) -> Iterator[Image]:
    """An image with a user, whose home folder is in /home."""
    with Image() as made:
        (pth,) = (ROOT / "tests" / "harness").glob("*.pth")
        given = user, str(number), f"/home/{user}", pth.read_text()
        made.run("bash", "-c", _MAKE, "bash", *given, user=0)
        yield made


def mounts() -> dict[str, Path]:
    """The folders that pods see of this machine, by their paths in the pod."""
    return {
        "/opt/job/horoplug": ROOT / "horoplug",
        "/opt/clusters": CLUSTERS,
        _PACKAGES: Path(sysconfig.get_path("purelib")),
    }
