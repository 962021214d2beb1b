"""Horovod's own examples run unedited under ``horovodrun --compat`` (``make test-upstream-examples``).

``HOROVOD_CLONE`` is the path of a clone of Horovod's repository. The examples of its tag v0.28.1 run. Not among them:
those for MXNet, Petastorm, tf.data service and sessions of TensorFlow 1, whose frameworks do not exist any more or
which horoplug does not provide (docs/migrating-from-horovod.md), and those that need a download that has no stand-in
in tests/harness/upstream.py."""

import os
import subprocess
import sys

import pytest

from horoplug.compat.names import VERSION
from tests.harness.limits import scaled
from tests.harness.support import environment

CLONE = os.environ.get("HOROVOD_CLONE", "")

FEW = "--num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 2 --batch-size 2"
STATIC = {
    "adasum/adasum_small_model.py": "--mode square --learning_rate 0.001 --x_max 1.0",
    "pytorch/pytorch_mnist.py": "--epochs 1",
    "pytorch/pytorch_mnist.py --use-adasum": "--epochs 1 --use-adasum",
    "pytorch/pytorch_mnist.py --fp16": "--epochs 1 --fp16-allreduce --gradient-predivide-factor 2",
    "pytorch/pytorch_synthetic_benchmark.py": FEW,
    "tensorflow2/tensorflow2_mnist.py": "",
    "tensorflow2/tensorflow2_keras_mnist.py": "",
    "tensorflow2/tensorflow2_synthetic_benchmark.py": FEW,
    "tensorflow2/tensorflow2_keras_synthetic_benchmark.py": FEW,
}
ELASTIC = {
    "elastic/pytorch/pytorch_mnist_elastic.py": "--epochs 1",
    "elastic/pytorch/pytorch_synthetic_benchmark_elastic.py": "--num-warmup-batches 1 --num-batches-per-iter 2 "
    "--num-iters 2 --batch-size 2",
    "elastic/tensorflow2/tensorflow2_mnist_elastic.py": "",
    "elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py": "",
    "elastic/tensorflow2/tensorflow2_synthetic_benchmark_elastic.py": FEW,
}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """A folder with the examples of the clone."""
    if not CLONE:
        pytest.skip("HOROVOD_CLONE is not set")
    folder = tmp_path_factory.mktemp("horovod")
    archive = ["git", "-C", CLONE, "archive", f"v{VERSION}", "examples"]
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as source:
        subprocess.run(["tar", "x", "-C", folder], stdin=source.stdout, check=True)
    assert source.returncode == 0
    return folder / "examples"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", [*STATIC, *ELASTIC])
def test_example_of_horovod_runs(examples, tmp_path, example):
    arguments = {**STATIC, **ELASTIC}[example].split()
    ranks = ["--min-np", "2", "-H", "localhost:2"] if example in ELASTIC else []
    program = examples / example.split()[0]
    command = [sys.executable, "-m", "horoplug.runner", "--compat", "-np", "2", *ranks]
    command += [sys.executable, "-m", "tests.harness.upstream", str(program), *arguments]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment() | {"HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=scaled(580),
    )
    assert done.returncode == 0, done.stdout + done.stderr
