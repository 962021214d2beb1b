"""The training example of PyTorch, unchanged, under ``horovodrun`` and under another launcher: the parameters are the
same."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.harness.limits import scaled
from tests.harness.support import environment
from tests.harness.train_example import TRAIN, write_fashion_mnist

RANKS = 2


def as_script(script: str, arguments: list[str]) -> None:
    """Run a script as ``python script arguments`` does, in a process that a cluster has started."""
    before, sys.argv = sys.argv, [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = before


def assert_same_as_horovodrun(folder: Path, train: Callable[[str, list[str]], object]) -> None:
    """Train under ``horovodrun``, and by ``train``, which gets the script and its arguments; compare the parameters."""
    import torch

    write_fashion_mnist(folder)
    files = [folder / "horovodrun", folder / "other"]
    options = ["--data-dir", str(folder), "--epochs", "2", "--threads", "1"]
    command = [sys.executable, str(TRAIN), *options, "--save", str(files[0])]
    subprocess.run(
        [sys.executable, "-m", "horoplug.runner", "-np", str(RANKS), *command],
        env=environment(),
        timeout=scaled(100),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    train(str(TRAIN), [*options, "--save", str(files[1])])
    expected, found = (torch.load(file, weights_only=True) for file in files)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
