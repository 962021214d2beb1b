"""Training that commits each step in real jobs, with the parameters of an undisturbed run as the reference."""

import importlib.util
import random

import pytest

from tests.harness import program_text
from tests.harness.elastic_launcher import PRELOADS
from tests.harness.elastic_training import check, launch, plan
from tests.harness.in_place_training import run_with_failure
from tests.harness.keras_jobs import QUIET
from tests.harness.support import QUICK_XLA, seed

STEPS = 40
KERAS = program_text("tests/elastic/programs/in_place_keras.py")


@pytest.mark.parametrize("moment", ["forward", "backward", "reduced", "step"])
def test_training_with_a_failure_gives_the_parameters_of_an_undisturbed_run(moment, tmp_path):
    draw = random.Random(seed())
    victim, step = draw.randrange(3), draw.randrange(1, 25)
    run_with_failure(tmp_path, victim, step, moment, STEPS, rollback=False, device="cpu")


@pytest.mark.parametrize(
    ("loop", "backend", "size", "moments"),
    [
        ("function", "tensorflow", 3, ["backward", "reduction", "update"]),
        ("fit", "tensorflow", 2, ["commit"]),
        pytest.param("fit", "torch", 2, ["update"], marks=pytest.mark.matrix),
    ],
    ids=["tensorflow", "keras on tensorflow", "keras on torch"],
)
def test_keras_training_with_failures_copies_nothing_and_loses_no_step(
    loop, backend, size, moments, tmp_path
):
    """Processes are killed before and during the reductions of a step, between them and the update, and in a commit."""
    for name in ("keras", backend):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    draw = random.Random(seed())
    faults = [
        {
            "ranks": [draw.randrange(size)],
            "moment": moment,
            "step": 4 * number + draw.randrange(1, 4),
            "how": "SIGKILL",
        }
        for number, moment in enumerate(moments)
    ]
    env = plan(tmp_path, size, faults, KERAS_BACKEND=backend, TEST_LOOP=loop, **QUIET, **QUICK_XLA)
    launch(size, size - 1, KERAS, env, preload=PRELOADS["keras"])
    check(tmp_path)
