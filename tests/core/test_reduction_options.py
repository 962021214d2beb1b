"""Options of the reduction of gradients are checked in one place, and alike in every framework."""

import importlib

import pytest

import horoplug as hvd
from horoplug.common.reduction_options import ReductionOptions

LISTS = "groups takes a positive number or a list of lists of variables"
INVALID = [
    ({"op": 77}, ValueError, "op=77 is not a reduction"),
    ({"compression": "fp16"}, TypeError, "compression= takes Compression.none"),
    ({"gradient_predivide_factor": 0.0}, ValueError, "takes a positive number, got 0.0"),
    ({"gradient_predivide_factor": -1.0}, ValueError, "takes a positive number, got -1.0"),
    ({"gradient_predivide_factor": float("nan")}, ValueError, "takes a positive number, got nan"),
    ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, ValueError, "is for op=Average only"),
    ({"num_groups": -1}, ValueError, "num_groups takes a number of groups, got -1"),
    ({"num_groups": 1.5}, ValueError, "num_groups takes a number of groups, got 1.5"),
    ({"groups": 0}, ValueError, LISTS),
    ({"groups": True}, ValueError, LISTS),
    ({"groups": "ab"}, ValueError, LISTS),
    ({"groups": [1, 2]}, ValueError, LISTS),
    ({"process_set": 3}, TypeError, "process_set= takes a ProcessSet, got int"),
    ({"backward_passes_per_step": 0}, ValueError, "takes a positive number, got 0"),
]


@pytest.mark.parametrize(("options", "kind", "text"), INVALID, ids=lambda value: str(value)[:40])
def test_an_invalid_option_is_one_line(options, kind, text):
    with pytest.raises(kind) as raised:
        ReductionOptions(**options)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_groups_take_precedence_over_their_older_name():
    assert ReductionOptions().groups is None
    assert ReductionOptions(num_groups=2).groups == 2
    assert ReductionOptions(num_groups=2, groups=3).groups == 3
    given = [["a"], ["b"]]
    kept = ReductionOptions(groups=given).groups
    given[0].append("c")
    assert kept == [["a"], ["b"]]


def test_predivide_factor_divides_before_the_reduction_and_multiplies_after_it():
    options = ReductionOptions(gradient_predivide_factor=4.0)
    assert (options.prescale, options.postscale) == (0.25, 4.0)


def torch_optimizer(hvd):
    torch = importlib.import_module("torch")
    return hvd.DistributedOptimizer, torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)


def tensorflow_optimizer(hvd):
    tf = importlib.import_module("tensorflow")
    return hvd.DistributedOptimizer, tf.compat.v1.train.GradientDescentOptimizer(0.1)


def tensorflow_tape(hvd):
    tf = importlib.import_module("tensorflow")
    return hvd.DistributedGradientTape, tf.GradientTape()


def keras_optimizer(hvd):
    keras = importlib.import_module("keras")
    return hvd.DistributedOptimizer, keras.optimizers.SGD(0.1)


def jax_optimizer(hvd):
    optax = importlib.import_module("optax")
    return hvd.DistributedOptimizer, optax.sgd(0.1)


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("torch", torch_optimizer),
        ("tensorflow", tensorflow_optimizer),
        ("tensorflow", tensorflow_tape),
        ("keras", keras_optimizer),
        ("tensorflow.keras", keras_optimizer),
        ("jax", jax_optimizer),
    ],
)
@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"op": 77}, ValueError, "op=77 is not a reduction"),
        ({"compression": "fp16"}, TypeError, "compression= takes Compression.none"),
        ({"process_set": 3}, TypeError, "process_set= takes a ProcessSet, got int"),
    ],
    ids=["op", "compression", "process_set"],
)
def test_every_framework_refuses_it_with_the_same_words(module, make, options, kind, text):
    function, wrapped = make(pytest.importorskip(f"horoplug.{module}"))
    with pytest.raises(kind) as raised:
        function(wrapped, **options)
    assert text in str(raised.value)
