"""KerasEstimator on real sessions, with two backends of Keras. The programs check the results themselves."""

import importlib.util
import subprocess
import sys

import pytest

from tests.harness import ROOT
from tests.harness.support import environment


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param("simple", "torch", marks=pytest.mark.matrix),
        pytest.param("simple", "jax", marks=pytest.mark.matrix),
        ("several", "tensorflow"),
    ],
)
@pytest.mark.short
def test_keras_estimator(tmp_path, case, backend):
    if importlib.util.find_spec("keras") is None or importlib.util.find_spec(backend) is None:
        pytest.skip(f"needs Keras and {backend}")
    done = subprocess.run(
        [
            *("timeout", "-k", "5", "380"),
            sys.executable,
            "-m",
            "tests.harness.spark_keras",
            case,
            tmp_path,
        ],
        env=environment() | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if case == "simple":
        assert "Epoch 4/4" in done.stdout  # Keras' own lines, of rank 0 only
        assert done.stdout.count("Epoch 1/2") == 1
