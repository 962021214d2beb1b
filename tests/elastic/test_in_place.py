"""Training without rollback in real jobs, with the parameters of an undisturbed run as the reference."""

import hashlib
import random
import sys

import pytest
import torch

from tests.harness.elastic_launcher import launched
from tests.harness.in_place_training import ends, program, undisturbed
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
    found = ends(out)
    assert found.keys() == {0, 1, 2, 3} - {victim}
    parameters = torch.load(path)
    bits = hashlib.sha256(b"".join(p.numpy().tobytes() for p in parameters)).hexdigest()
    # No step was lost or made twice.
    assert set(found.values()) == {(3, STEPS, bits)}
    for ours, reference in zip(parameters, undisturbed(STEPS), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
