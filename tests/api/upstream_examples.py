"""Horovod's own examples run unedited under the name horovod (``make test-upstream-examples``).

``HOROVOD_CLONE`` is the path of a clone of Horovod's repository. The examples of its tag v0.28.1 run, those for Keras
with Keras 2. Not among them: those for MXNet, Petastorm, the tf.data service, TensorFlow 1 and Lightning 1, which do
not exist any more or which horoplug does not provide (docs/migrating-from-horovod.md); those for Ray, which ask for
GPUs or 64 processors; those for Spark that download data for which tests/harness/upstream.py has no stand-in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from horoplug.compat.names import VERSION
from tests.harness import ROOT, spark_cluster, upstream
from tests.harness.limits import scaled
from tests.harness.support import environment

CLONE = os.environ.get("HOROVOD_CLONE", "")

FEW = "--num-batches-per-iter 2 --num-iters 2 --batch-size 2"
FEW_AND_WARM_UP = f"--num-warmup-batches 1 {FEW}"
IMAGES = "--epochs 1 --batch-size 4 --val-batch-size 4"
STATIC = {
    "adasum/adasum_small_model.py": "--mode square --learning_rate 0.001 --x_max 1.0",
    "pytorch/pytorch_imagenet_resnet50.py": f"{IMAGES} --batches-per-allreduce 2",
    "pytorch/pytorch_mnist.py": "--epochs 1",
    "pytorch/pytorch_mnist.py --use-adasum": "--epochs 1 --use-adasum",
    "pytorch/pytorch_mnist.py --fp16": "--epochs 1 --fp16-allreduce --gradient-predivide-factor 2",
    "pytorch/pytorch_synthetic_benchmark.py": FEW_AND_WARM_UP,
    "tensorflow2/tensorflow2_mnist.py": "",
    "tensorflow2/tensorflow2_keras_mnist.py": "",
    "tensorflow2/tensorflow2_synthetic_benchmark.py": FEW_AND_WARM_UP,
    "tensorflow2/tensorflow2_keras_synthetic_benchmark.py": FEW,
}
ELASTIC = {
    "elastic/pytorch/pytorch_imagenet_resnet50_elastic.py": IMAGES,
    "elastic/pytorch/pytorch_mnist_elastic.py": "--epochs 1",
    "elastic/pytorch/pytorch_synthetic_benchmark_elastic.py": FEW_AND_WARM_UP,
    "elastic/tensorflow2/tensorflow2_mnist_elastic.py": "",
    "elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py": "",
    "elastic/tensorflow2/tensorflow2_synthetic_benchmark_elastic.py": FEW_AND_WARM_UP,
}
SPARK = "spark/keras/keras_spark_mnist.py", "spark/pytorch/pytorch_spark_mnist.py"


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


def run(command: list[str], folder: Path, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment() | {"HOME": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3"} | variables,
        capture_output=True,
        text=True,
        timeout=scaled(580),
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", [*STATIC, *ELASTIC])
def test_example_of_horovod_runs(examples, tmp_path, example):
    arguments = {**STATIC, **ELASTIC}[example].split()
    ranks = ["--min-np", "2", "-H", "localhost:2"] if example in ELASTIC else []
    program = examples / example.split()[0]
    command = ["-m", "horoplug.runner", "--compat", "-np", "2", *ranks]
    command += [sys.executable, "-m", "tests.harness.upstream", str(program), *arguments]
    run(command, tmp_path, TF_USE_LEGACY_KERAS="1")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", SPARK)
def test_example_of_estimators_runs(examples, tmp_path, example):
    upstream.write_libsvm(tmp_path / "mnist.bz2", 320)
    command = ["-m", "horoplug.compat", str(examples / example), "--num-proc", "2", "--epochs", "2"]
    command += ["--work-dir", str(tmp_path), "--data-dir", str(tmp_path)]
    spark = spark_cluster.variables()
    spark["PYTHONPATH"] += os.pathsep + str(ROOT / "build" / "upstream-examples")
    run(command, tmp_path, **spark)
