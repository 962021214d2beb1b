"""Elastic jobs with PyTorch's CUDA tensors lose no step when a process is killed, with and without rollback."""

import random
import sys

import pytest

from tests.harness.elastic_launcher import launched
from tests.harness.in_place_training import check_job, program
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
    victim = draw.randrange(3)
    failure = victim, draw.randrange(1, 25), moment
    text = program(STEPS, failure, rollback=rollback, device="cuda")
    path = tmp_path / "parameters"
    code, out, err = launched(
        *("-np", 3, "--min-np", 2, sys.executable, "-c", text),
        PARAMETERS=str(path),
        FULL_SIZE="3",
    )
    assert code == 0, err
    check_job(out, path, {0, 1, 2} - {victim}, STEPS, "cuda")
