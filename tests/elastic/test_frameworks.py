"""Elastic jobs of each framework: processes fail, others replace them, and the training gets the result that it gets
without failures."""

import importlib.util
import random
import re

import pytest

from tests.harness import program_text
from tests.harness.elastic_launcher import PRELOADS
from tests.harness.elastic_training import (
    MOMENTS,
    check,
    check_faults,
    launch,
    plan,
    some_faults,
)
from tests.harness.keras_jobs import QUIET
from tests.harness.support import QUICK_XLA, seed


def needs(name):
    """Skip a test if a framework is not installed. It is not imported here, since it may start threads."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

TORCH = program_text("tests/elastic/programs/frameworks_torch.py")


@pytest.mark.short(failure=True)
def test_torch_training_survives_each_kind_of_failure(tmp_path):
    """One process after the other fails, rank 0 included; survivors go on, and a replacement joins them."""
    key = seed()
    faults = some_faults(key, 3, ["SIGKILL", "exit", "exception", "SIGSTOP", "memory", "SIGKILL"])
    faults[-1]["ranks"] = [0]
    launch(3, 2, TORCH, plan(tmp_path, 3, faults), preload=PRELOADS["torch"])
    check(tmp_path)


def test_torch_job_survives_failures_of_several_processes_and_failures_during_recovery(tmp_path):
    """Two processes are killed in the same instant; one in a reset callback and one in ``sync``, both while the job
    recovers; and all processes, so that the program begins again. Replacements create an optimizer with groups of
    parameters while the other processes train."""
    draw = random.Random(seed())
    kill = {"how": "SIGKILL", "step": 0}
    faults = [
        {**kill, "ranks": draw.sample(range(4), 2), "moment": draw.choice(MOMENTS), "step": 2},
        {**kill, "ranks": [draw.randrange(4)], "moment": "backward"},
        {**kill, "ranks": [draw.randrange(3)], "moment": "reset"},
        {**kill, "ranks": [draw.randrange(4)], "moment": "commit"},
        {**kill, "ranks": [draw.randrange(3)], "moment": "sync"},
        {**kill, "ranks": draw.sample(range(4), 4), "moment": draw.choice(MOMENTS)},
    ]
    program = TORCH.replace("model.named_parameters())", "model.named_parameters(), groups=2)", 1)
    assert program != TORCH
    launch(4, 2, program, plan(tmp_path, 4, faults), preload=PRELOADS["torch"])
    by_rank = check(tmp_path)
    assert min(end["process"] for end in by_rank) >= 4  # none of the first processes


DIES_IN_INIT = """
from horoplug.common import context
start = context.start_engine

def start_or_die(config, *args):
    faults.at("init", 0, config.rank)
    return start(config, *args)

context.start_engine = start_or_die
"""


def test_survivor_goes_on_when_another_process_dies_between_connecting_and_its_first_operation(
    tmp_path,
):
    kill = {"how": "SIGKILL", "ranks": [1]}
    faults = [{**kill, "moment": "backward", "step": 2}, {**kill, "moment": "init", "step": 0}]
    before = "train(hvd, faults, state, one_step)"
    launch(
        3,
        2,
        TORCH.replace(before, DIES_IN_INIT + before),
        plan(tmp_path, 3, faults),
        preload=PRELOADS["torch"],
    )
    check(tmp_path)


SAMPLER = program_text("tests/elastic/programs/frameworks_sampler.py")


@pytest.mark.short
def test_elastic_sampler_deals_each_sample_once_in_committed_training(tmp_path):
    """The last batches of 1000 samples are smaller. A sample is repeated only to fill the last batch of an epoch."""
    key = seed()
    faults = some_faults(key, 3, ["SIGKILL"] * 3)
    faults[-1]["step"] = 10 + key % 3  # near the end of an epoch of 11 steps
    launch(3, 2, SAMPLER, plan(tmp_path, 3, faults), preload=PRELOADS["torch"])
    by_rank = check(tmp_path)
    seen: dict[int, list[int]] = {}
    for epoch, samples in by_rank[0]["seen"]:
        seen.setdefault(epoch, []).extend(samples)
    assert len(seen) >= 2
    for samples in seen.values():
        assert sorted(samples[:1000]) == list(range(1000))
        assert len(samples) - 1000 < 3


# ---- TensorFlow ------------------------------------------------------------------------------------------------------

TENSORFLOW = program_text("tests/elastic/programs/frameworks_tensorflow.py")


def test_tensorflow_training_survives_failures(tmp_path):
    needs("tensorflow")
    faults = some_faults(seed(), 3, ["SIGKILL"])
    launch(3, 2, TENSORFLOW, plan(tmp_path, 3, faults, **QUIET), preload=PRELOADS["tensorflow"])
    check(tmp_path)


# ---- JAX -------------------------------------------------------------------------------------------------------------

JAX = program_text("tests/elastic/programs/frameworks_jax.py")


def test_jax_training_survives_failures(tmp_path):
    needs("jax")
    faults = some_faults(seed(), 3, ["SIGKILL", "exception"])
    launch(3, 2, JAX, plan(tmp_path, 3, faults, **QUICK_XLA), preload=PRELOADS["jax"])
    check(tmp_path)


# ---- Keras, under Horovod's name -------------------------------------------------------------------------------------

KERAS = program_text("tests/elastic/programs/frameworks_keras.py")


@pytest.mark.parametrize(
    "backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.matrix), "jax"]
)
def test_keras_training_survives_a_failure(backend, tmp_path):
    needs(backend)
    needs("keras")
    faults = some_faults(seed(), 3, ["SIGKILL"])
    env = plan(tmp_path, 3, faults, KERAS_BACKEND=backend, **QUIET, **QUICK_XLA)
    launch(3, 2, KERAS, env, flags=["--compat"], preload=PRELOADS["keras"])
    check(tmp_path)


# ---- programs that were written for Horovod --------------------------------------------------------------------------

HOROVOD_TORCH = program_text("tests/elastic/programs/frameworks_horovod_torch.py")

HOROVOD_TENSORFLOW = program_text("tests/elastic/programs/frameworks_horovod_tensorflow.py")

HOROVOD_TENSORFLOW_KERAS = program_text(
    "tests/elastic/programs/frameworks_horovod_tensorflow_keras.py"
)


@pytest.mark.parametrize(
    ("framework", "program"),
    [
        ("torch", HOROVOD_TORCH),
        ("tensorflow", HOROVOD_TENSORFLOW),
        ("tensorflow.keras", HOROVOD_TENSORFLOW_KERAS),
    ],
    ids=["torch", "tensorflow", "tensorflow.keras"],
)
def test_programs_for_horovod_run_unedited_and_survive_a_failure(framework, program, tmp_path):
    """The models of TensorFlow and Keras have no variables before their first step, so that those of a replacement are
    built by the state."""
    needs(framework.partition(".")[0])
    draw = random.Random(seed())
    fault = {
        "ranks": [draw.randrange(2)],
        "moment": "commit",
        "step": draw.randrange(1, 4),
        "how": "SIGKILL",
    }
    env = plan(tmp_path, 2, [fault], **QUIET)
    unedited = ["-m", "tests.harness.elastic_training"]
    output = launch(
        2,
        2,
        program,
        env,
        flags=["--compat"],
        run_by=unedited,
        preload=PRELOADS[framework.partition(".")[0]],
    )
    _, _, (victim,) = check_faults(tmp_path)
    results = dict(re.findall(r"^\[(\d+)\]<stdout>:result (.*)$", output, re.M))
    assert sorted(map(int, results)) == sorted({0, 1, 2} - {victim})
    assert len(set(results.values())) == 1
    assert next(iter(results.values())).startswith("2 ")
