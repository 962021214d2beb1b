"""Training that commits each step in real jobs, with the parameters of an undisturbed run as the reference."""

import random
import sys

import pytest

from tests.harness.elastic_launcher import launched
from tests.harness.in_place_training import check_job, program
from tests.harness.support import seed

STEPS = 40


@pytest.mark.parametrize("moment", ["forward", "backward", "reduced", "step"])
def test_training_with_a_failure_gives_the_parameters_of_an_undisturbed_run(moment, tmp_path):
    draw = random.Random(seed())
    victim = draw.randrange(3)
    text = program(STEPS, (victim, draw.randrange(1, 25), moment))
    path = tmp_path / "parameters"
    code, out, err = launched(
        *("-np", 3, "--min-np", 2, sys.executable, "-c", text),
        PARAMETERS=str(path),
        FULL_SIZE="3",
    )
    assert code == 0, err
    check_job(out, path, {0, 1, 2} - {victim}, STEPS, "cpu")
