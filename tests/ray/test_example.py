"""The training program of the examples gives the same under Ray and under horovodrun; Ray may be missing."""

import json
import re
import subprocess
import sys

import pytest

from tests.harness import ROOT
from tests.harness.limits import scaled
from tests.harness.ray_driver import variables
from tests.harness.support import environment
from tests.harness.train_example import TRAIN, write_fashion_mnist

pytest_plugins = ["tests.harness.ray_driver"]

EXAMPLE = ROOT / "examples" / "ray" / "train_fashion.py"


def _results(command, env):
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(150))
    found = re.findall(r'\{"data": .*\}$', done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    result = json.loads(found[-1])
    return result["processes"], [(each["loss"], each["accuracy"]) for each in result["epochs"]]


def test_the_training_example_gives_the_same_under_ray_and_horovodrun(on_ray, tmp_path):
    write_fashion_mnist(tmp_path)
    program = ["--data-dir", str(tmp_path), "--epochs", "2", "--threads", "1", "--json"]
    address = on_ray(lambda cluster: cluster.address)
    by_ray = _results(
        [sys.executable, str(EXAMPLE), "--address", address, "--", *program], variables()
    )
    launcher = [sys.executable, "-m", "horoplug.runner", "-np", "2", sys.executable, str(TRAIN)]
    by_launcher = _results([*launcher, *program], environment())
    assert by_ray[0] == by_launcher[0] == 2
    for mine, others in zip(by_ray[1], by_launcher[1], strict=True):
        assert mine == pytest.approx(others, rel=1e-5)


@pytest.mark.parametrize("module", ["horoplug.ray", "horoplug.ray.train", "horoplug.ray.elastic"])
def test_a_missing_ray_is_one_line(module):
    code = f"import sys; sys.modules['ray'] = None; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "ImportError: horoplug.ray needs Ray: pip install 'horoplug[ray]'"


def test_an_old_ray_is_one_line():
    code = "import ray; ray.__version__ = '2.9.3'; import horoplug.ray"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=variables(),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.stderr.splitlines()[-1] == (
        "ImportError: horoplug.ray needs Ray 2.43 or later, and this is 2.9.3: pip install 'horoplug[ray]'"
    )


def test_importing_does_not_import_pytorch():
    code = "import sys, horoplug.ray, horoplug.ray.train; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=variables(), check=True, timeout=scaled(100))


def test_horovods_names_of_ray_exist():
    code = """
import horoplug.compat
horoplug.compat.install()
from horoplug.compat.attributes import lacking_in
from horoplug.compat.surface import OWN
modules = [module for module in OWN if module.startswith("horovod.ray")]
names = [(module, name) for module in modules for name in {*OWN[module].split()} - {*lacking_in(module)}]
assert len(names) > 15
for module, name in names:
    exec(f"from {module} import {name}")
import horovod.ray, horoplug.ray
assert horovod.ray.RayExecutor is horoplug.ray.RayExecutor
"""
    subprocess.run([sys.executable, "-c", code], env=variables(), check=True, timeout=scaled(100))
