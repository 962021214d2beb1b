"""The wheel with the frameworks of the test environments. Not part of make test: make test-wheels.

The wheels are linked with another C++ library than PyPI's TensorFlow (csrc/bindings/tensorflow/libstdcxx.h), so that
tests of the checkout say nothing about them. make compat-matrix has other versions."""

import os

import pytest

from tests.harness import ROOT
from tests.harness.wheels import run, wheel

PROGRAMS = ROOT / "tests" / "versions" / "programs"
# With a framework, as a program's arguments. A job that ends with code 0 has passed all checks of its program, of which
# one is that horoplug is the wheel's. Operations of TensorFlow and JAX run in compiled functions, too, and one fails in
# each kind of these.
CASES = [
    (".venv", "operations.py tensorflow"),
    (".venv", "operations.py jax"),
    (".venv", "operations.py torch"),
    (".venv", "optimizer_tensorflow.py"),
    (".venv", "optimizer_keras.py keras"),
    (".venv", "optimizer_torch.py"),
    (".venv-oldest", "operations.py tensorflow"),
    (".venv-oldest", "optimizer_tensorflow.py"),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A function: of an environment that has the wheel and all that another one has, the folder of programs."""
    made = {}

    def environment(name):
        if name not in made:
            made[name] = make(
                tmp_path_factory.mktemp("environment"), ROOT / name / "bin" / "python"
            )
        return made[name]

    return environment


def output(*command):
    return run(*command).stdout.strip()


def make(home, other):
    file = wheel(output(other, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"))
    run(other, "-m", "venv", home)
    install = (home / "bin" / "python", "-m", "pip", "install", "-q")
    run(*install, "--no-deps", file)
    (packages,) = home.glob("lib/python3*/site-packages")
    others = output(other, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    (packages / "others.pth").write_text(others + "\n")
    run(*install, file)  # what it needs and the other environment does not have
    return home / "bin"


@pytest.mark.parametrize(("environment", "program"), CASES)
def test_two_ranks_use_the_wheel_with_a_framework(programs, tmp_path, environment, program):
    bin = programs(environment)
    file, *arguments = program.split()
    variables = {"HOROPLUG_VERSIONS_RESULTS": str(tmp_path), "KERAS_BACKEND": "tensorflow"}
    variables |= {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"}
    command = (bin / "horovodrun", "-np", 2, bin / "python", PROGRAMS / file, *arguments)
    run(*command, cwd=tmp_path, env=os.environ | variables)
    assert {file.name for file in tmp_path.glob("*.json")} == {"0.json", "1.json"}
