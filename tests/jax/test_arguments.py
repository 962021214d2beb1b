"""Every argument of the functions for JAX has an effect: on the traced program, on the result, or an error."""

import numpy as np
import pytest

import horoplug
from tests.harness import arguments
from tests.harness.arguments import Outcomes, ShownBy

jax = pytest.importorskip("jax")
hvd = pytest.importorskip("horoplug.jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

pytest_plugins = ["tests.harness.jobs"]

OPERATIONS = (
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
)
GRADIENTS = ShownBy("tests/jax/test_optimizer.py")
X = np.arange(4, dtype=np.float32) + np.float32(1 / 3)


def traced(function, values):
    """The program of a call: its operations with all of their options."""
    tensor = "tensors" if "tensors" in values else "tensor"
    options = {key: value for key, value in values.items() if key != tensor}
    return jax.make_jaxpr(lambda x: function(x, **options))(values[tensor])


def optimizer(optimizer=0.1, **options):
    """The program of two updates, and the state."""
    made = hvd.DistributedOptimizer(optax.sgd(optimizer), **options)

    def steps(x):
        state = made.init(x)
        first, state = made.update(x, state, x)
        return first, made.update(x, state, x)

    return str(jax.make_jaxpr(steps)([X, X[:2]]))


def gradient(fun=2.0, argnums=0, has_aux=False, options=None, value=False, **others):
    function = hvd.distributed_value_and_grad if value else hvd.distributed_grad

    def loss(x, y):
        result = (x**fun * y).sum()
        return (result, x) if has_aux else result

    call = function(loss, argnums, has_aux, **(options or {}), **others)
    return str(jax.make_jaxpr(call)(X, 2 * X))


def check():
    unregistered = horoplug.ProcessSet([1])
    common = {
        "average": False,
        "name": "named",
        "compression": hvd.Compression.bf16,
        "op": hvd.Sum,
        "prescale_factor": 2.0,
        "postscale_factor": 3.0,
        "process_set": unregistered,
        "root_rank": 1,
        "splits": [4],
        "groups": [["[0]"]],
        "gradient_predivide_factor": 3.0,
    }
    of_gradients = {
        "fun": 3.0,
        "argnums": 1,
        "has_aux": True,
        "options": {"allow_int": 1, "wrong": 1},
    }
    rows = {
        "DistributedOptimizer": {
            "optimizer": 0.2,
            "backward_passes_per_step": 2,
            "average_aggregated_gradients": Outcomes(
                lambda: tuple(
                    optimizer(backward_passes_per_step=2, average_aggregated_gradients=on)
                    for on in (False, True)
                )
            ),
        },
        "distributed_grad": of_gradients,
        "distributed_value_and_grad": of_gradients,
        "broadcast_parameters": {"params": X * 2, "root_rank": 1},
        "broadcast_optimizer_state": {"state": X * 2, "root_rank": 1},
        "allgather_object": {"obj": 1, "name": ShownBy("tests/core/test_objects.py")},
        "broadcast_object": {"obj": 1, "name": ShownBy("tests/core/test_objects.py")},
        "barrier": {},
        "join": {},
    }
    usual = {
        "broadcast_parameters": {"params": X},
        "broadcast_optimizer_state": {"state": X},
        "allgather_object": {"obj": 0},
        "broadcast_object": {"obj": 0},
    }
    runs = {
        "DistributedOptimizer": optimizer,
        "distributed_grad": gradient,
        "distributed_value_and_grad": lambda **options: gradient(value=True, **options),
    }
    functions = arguments.public_functions(hvd, horoplug)
    functions = {n: f for n, f in functions.items() if arguments.inspect.signature(f).parameters}

    def rows_of(name):
        accepted = arguments.inspect.signature(functions[name]).parameters
        values = {key: value for key, value in common.items() if key in accepted}
        if name in OPERATIONS:
            values["tensors" if name.startswith("grouped") else "tensor"] = (
                [X * 2, X] if name.startswith("grouped") else X[:2]
            )
        return values | rows.get(name, {})

    def usual_of(name):
        if name not in OPERATIONS:
            return usual.get(name, {})
        values = {"tensors": [X]} if name.startswith("grouped") else {"tensor": X}
        return values | ({"root_rank": 0} if name == "broadcast" else {})

    def run(function, values):
        name = function.__name__
        if name in runs:
            return runs[name](**values)
        return traced(function, values) if name in OPERATIONS else function(**values)

    return arguments.without_effect(functions, usual_of, rows_of, run)


def test_every_argument_has_an_effect(pool):
    with pool.ranks(1) as job:
        assert job.run(check) == [[]]
