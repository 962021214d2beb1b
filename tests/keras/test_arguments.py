"""Every argument of the functions for Keras has an effect, or the users' guide says that it has none."""

import numpy as np
import pytest

import horoplug
from tests.harness import arguments
from tests.harness.arguments import NoEffect, Outcomes, ShownBy

keras = pytest.importorskip("keras")
hvd = pytest.importorskip("horoplug.keras")

pytest_plugins = ["tests.harness.jobs"]

FIT = ShownBy("tests/keras/test_fit.py")
OPERATIONS = ("allgather", "allreduce", "broadcast", "reducescatter")
OPTIONS = {
    "op": 9,
    "groups": -1,
    "num_groups": -1,
    "backward_passes_per_step": 0,
    "gradient_predivide_factor": Outcomes(
        lambda: (distributed(op=1), distributed(op=1, gradient_predivide_factor=2.0))
    ),
}


def distributed(optimizer=0.1, make=None, **options):
    made = keras.optimizers.SGD(optimizer) if isinstance(optimizer, float) else optimizer
    return arguments.outcome(
        lambda: type((make or hvd.DistributedOptimizer)(made, **options)).__name__
    )


def compressed():
    x = keras.ops.convert_to_tensor(np.float32(1 / 3))
    options = ({}, {"compression": hvd.Compression.fp16})
    return tuple(np.asarray(hvd.allreduce(x, **each)).tolist() for each in options)


def rows(name):
    unregistered = horoplug.ProcessSet([0])
    accepted = arguments.inspect.signature(getattr(hvd, name)).parameters
    if name in OPERATIONS:
        values = {
            "value": [2.0],
            "name": 3,
            "average": np.ones(2),
            "prescale_factor": 2.0,
            "postscale_factor": 3.0,
            "op": 9,
            "root_rank": 9,
            "process_set": unregistered,
        }
        values = {key: value for key, value in values.items() if key in accepted}
        return values | ({"compression": Outcomes(compressed)} if name == "allreduce" else {})
    if name == "broadcast_global_variables":
        return {"root_rank": FIT, "model": 3}
    if name == "load_model":
        of_all = dict.fromkeys(accepted, FIT)
        return of_all | {"legacy_opts": NoEffect("the file says which optimizer it has")}
    return (
        dict.fromkeys(accepted, FIT)
        | {"optimizer": 3}
        | {key: value for key, value in OPTIONS.items() if key in accepted}
    )


def usual(name):
    if name in OPERATIONS:
        return {"value": [1 / 3], **({"root_rank": 0} if name == "broadcast" else {})}
    return {"root_rank": 0} if name == "broadcast_global_variables" else {}


def check():
    functions = {
        name: function
        for name, function in arguments.public_functions(hvd, horoplug).items()
        if arguments.inspect.signature(function).parameters
    }

    def run(function, values):
        if function.__name__.endswith("DistributedOptimizer"):
            return distributed(make=function, **values)
        return function(**values)

    return arguments.without_effect(functions, usual, rows, run)


def test_every_argument_has_an_effect(pool):
    with pool.ranks(1) as job:
        assert job.run(check) == [[]]
