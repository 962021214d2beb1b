"""Training that commits each step in real jobs, with the parameters of an undisturbed run as the reference."""

import random

import pytest

from tests.harness.in_place_training import run_with_failure
from tests.harness.support import seed

STEPS = 40


@pytest.mark.parametrize("moment", ["forward", "backward", "reduced", "step"])
def test_training_with_a_failure_gives_the_parameters_of_an_undisturbed_run(moment, tmp_path):
    draw = random.Random(seed())
    victim, step = draw.randrange(3), draw.randrange(1, 25)
    run_with_failure(tmp_path, victim, step, moment, STEPS, rollback=False, device="cpu")
