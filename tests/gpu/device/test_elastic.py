"""Elastic jobs with PyTorch's CUDA tensors lose no step when a process is killed, with and without rollback."""

import random

import pytest

from tests.harness.in_place_training import run_with_failure
from tests.harness.support import seed

torch = pytest.importorskip("torch")

STEPS = 40


@pytest.mark.parametrize("rollback", [False, True])
@pytest.mark.parametrize("moment", ["forward", "step"])
def test_training_with_a_failure_gives_the_parameters_of_an_undisturbed_run(
    moment, rollback, tmp_path
):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    draw = random.Random(seed())
    victim, step = draw.randrange(3), draw.randrange(1, 25)
    run_with_failure(tmp_path, victim, step, moment, STEPS, rollback=rollback, device="cuda")
