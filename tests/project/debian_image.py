"""The images of the Dockerfile in a bare Debian 12, which debootstrap makes. Not part of make test: make test-image.

HOROPLUG_TEST_WHEEL is the path of the wheel. HOROPLUG_TEST_DEBIAN may be a folder that debootstrap has made before."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.harness.image import Image, why_not
from tests.harness.limits import scaled

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(900)]

MIRROR = "http://deb.debian.org/debian"


@pytest.fixture(scope="module")
def debian():
    """What ``FROM debian:12-slim`` gives, about."""
    if made := os.environ.get("HOROPLUG_TEST_DEBIAN"):
        yield Path(made)
        return
    if shutil.which("debootstrap", path=os.environ["PATH"] + ":/usr/sbin") is None:
        pytest.skip("needs debootstrap")
    folder = Path(tempfile.mkdtemp(prefix="hpdebian"))
    folder.chmod(0o755)
    try:
        make = ["debootstrap", "--variant=minbase", "bookworm", folder, MIRROR]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=scaled(600))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def image(debian):
    wheel = Path(os.environ["HOROPLUG_TEST_WHEEL"])
    with Image("runtime", "sshd", "example", system=debian, wheel=wheel) as made:
        yield made


def test_image_has_no_compiler(image):
    for name in ("cc", "c++", "ld", "cmake", "make"):
        assert image.run("which", name, check=False).returncode == 1


def test_wheel_needs_no_further_package(image):
    program = "import horoplug as hvd; hvd.init(); print(hvd.allreduce(1.0, op=hvd.Sum))"
    done = image.run("horovodrun", "-np", "2", "python", "-c", program)
    assert sorted(done.stdout.split()) == ["[0]<stdout>:2.0", "[1]<stdout>:2.0"]
    assert image.run("id", "-u").stdout == "1000\n"


def test_user_can_run_the_ssh_server(image):
    """With the operator's keys, which are mounted in a pod."""
    program = """
        set -e
        mkdir ~/.ssh
        ssh-keygen -q -t ecdsa -b 521 -m PEM -N '' -f ~/.ssh/id_rsa
        cp ~/.ssh/id_rsa.pub ~/.ssh/authorized_keys
        /usr/sbin/sshd -De &
        ssh -o StrictHostKeyChecking=yes 127.0.0.1 'echo $PATH; id -un'
    """
    done = image.run("sh", "-c", program)
    assert done.stdout.split() == ["/opt/horoplug/bin:/usr/local/bin:/usr/bin:/bin", "horoplug"]


def test_image_has_the_example_and_its_data(image):
    """PyTorch, which the Dockerfile adds, is left out: 200 MiB."""
    program = "import ast; ast.parse(open('/workspace/train.py').read())"
    image.run("python", "-c", program)
    assert (
        "train-images-idx3-ubyte.gz" in image.run("ls", "/usr/share/datasets/fashion-mnist").stdout
    )


def test_image_is_small(image):
    """The steps add Python, NumPy, horoplug and ssh, and keep no caches."""
    sizes = image.run(
        "sh", "-c", "du -sm / --exclude=/proc --exclude=/dev 2>/dev/null", check=False
    )
    assert int(sizes.stdout.split()[0]) < 450
    for folder in ("/var/lib/apt/lists", "/root/.cache"):
        assert not image.run("sh", "-c", f"ls {folder} 2>/dev/null", check=False).stdout
