"""Every argument of the functions for TensorFlow has an effect, on the graph, on the result, or an error; or the users'
guide says that it has none."""

import pytest

import horoplug
from tests.harness import arguments
from tests.harness.arguments import NoEffect, Outcomes, ShownBy

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

pytest_plugins = ["tests.harness.jobs"]

OBJECTS = ShownBy("tests/core/test_objects.py")
GRADIENTS = ShownBy("tests/tensorflow/test_gradients.py")
OPTIMIZER = ShownBy("tests/tensorflow/test_optimizer.py")
NO_GRAPH = NoEffect("objects do not pass through a graph")
NO_DEVICE = "/job:none/device:no such device"


def graph(call):
    """The graph of a call: its operations with all attributes and devices."""
    with tf.Graph().as_default() as made, tf.name_scope("scope"):
        result = call()
    return [str(made.as_graph_def()), str(result)]


def slices():
    return tf.IndexedSlices(tf.fill([1, 2], 1 / 3), tf.constant([0]), tf.constant([2, 2]))


def of_slices(function, **changed):
    def call(options):
        values = {"tensors": [slices()]} if "grouped" in function.__name__ else {"tensor": slices()}
        return arguments.outcome(lambda: graph(lambda: function(**values, **options)))

    return lambda: (call({}), call(changed))


COMMON = {
    "average": False,
    "name": "named",
    "op": 1,
    "prescale_factor": 2.0,
    "postscale_factor": 3.0,
    "root_rank": 1,
    "splits": [4],
    "ignore_name_scope": True,
    "device_dense": NO_DEVICE,
    "process_set": None,
    "process_set_id": 1,
}
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


def gradients(make, local=False, gradtape=None, **options):
    """The graph of the gradients of an embedding, whose gradient is a tf.IndexedSlices, and of two dense variables."""

    def call():
        table, *dense = (tf.Variable(tf.ones(shape)) for shape in ([4, 2], [2], [2]))
        with make(gradtape or tf.GradientTape(), **options) as tape:
            loss = tf.reduce_sum(tf.gather(table, [0]) * dense[0] * dense[1])
        if local:
            tape.register_local_source(dense[0])
        return tape.gradient(loss, [table, *dense])

    return arguments.outcome(lambda: graph(call))


def tape_rows(make):
    def changed(argument, value, **others):
        return Outcomes(
            lambda: (gradients(make, **others), gradients(make, **others, **{argument: value}))
        )

    values = {
        "gradtape": 3,
        "device_dense": NO_DEVICE,
        "device_sparse": NO_DEVICE,
        "compression": hvd.Compression.fp16,
        "sparse_as_dense": True,
        "op": hvd.Sum,
        "gradient_predivide_factor": 3.0,
        "num_groups": 2,
        "groups": 2,
        "process_set": horoplug.ProcessSet([0]),
        "local_layers": 3,
    }
    accepted = arguments.inspect.signature(make).parameters
    rows = {key: changed(key, value) for key, value in values.items() if key in accepted}
    return rows | {"scale_local_gradients": changed("scale_local_gradients", False, local=True)}


def rows_of(name, function):
    accepted = arguments.inspect.signature(function).parameters
    values = {key: value for key, value in COMMON.items() if key in accepted}
    if "compression" in accepted:
        values["compression"] = hvd.Compression.fp16
    if "device_sparse" in accepted and name in OPERATIONS:
        values["device_sparse"] = Outcomes(of_slices(function, device_sparse=NO_DEVICE))
    if "tensor" in accepted:
        values["tensor"] = [2.0]
    if "tensors" in accepted:
        values["tensors"] = [[1.0], [2.0]]
    if "gradtape" in accepted:
        return tape_rows(function)
    special = {
        "broadcast_": {"variables": [tf.ones(1)], "name": ShownBy("tests/tensorflow/test_ops.py")},
        "broadcast_global_variables": {"root_rank": GRADIENTS},
        "broadcast_variables": {
            "variables": [tf.ones(1)],
            "inplace": NoEffect("variables are assigned in any case"),
        },
        "broadcast_object": {"obj": 1, "session": NO_GRAPH, "name": OBJECTS},
        "broadcast_object_fn": {
            "root_rank": OBJECTS,
            "session": NO_GRAPH,
            "name": OBJECTS,
            "process_set": OBJECTS,
        },
        "allgather_object": {"obj": 1, "session": NO_GRAPH, "name": OBJECTS},
        "gpu_available": {
            "ext_base_name": NoEffect("TensorFlow is asked"),
            "verbose": NoEffect("TensorFlow is asked"),
        },
        "BroadcastGlobalVariablesHook": {"root_rank": OPTIMIZER, "device": OPTIMIZER},
        "LocalGradientAggregationHelper": dict.fromkeys(accepted, OPTIMIZER),
        "DistributedOptimizer": dict.fromkeys(accepted, OPTIMIZER),
        "vars_to_refs": {"vars": 3},
        "refs_to_vars": {"refs": 3},
        "check_num_rank_power_of_2": {"num_rank": 3},
        "handle_average_backwards_compatibility": {"op": 1, "average": False},
    }
    return values | special.get(name, {})


USUAL = {
    "allgather_object": {"obj": 0},
    "broadcast_object": {"obj": 0},
    "broadcast_global_variables": {"root_rank": 0},
    "check_num_rank_power_of_2": {"num_rank": 2},
    "handle_average_backwards_compatibility": {"op": None, "average": None},
    "vars_to_refs": {"vars": []},
    "refs_to_vars": {"refs": []},
}


def check():
    functions = {
        name: function
        for name, function in arguments.public_functions(hvd, horoplug).items()
        if arguments.inspect.signature(function).parameters
    }

    def usual(name):
        values = dict(USUAL.get(name, {}))
        if name in ("broadcast_", "broadcast_variables"):
            values |= {"variables": [tf.Variable([1 / 3])], "root_rank": 0}
        if name in OPERATIONS:
            values |= {"tensors": [[1 / 3]]} if name.startswith("grouped") else {"tensor": [1 / 3]}
            values |= {"root_rank": 0} if name == "broadcast" else {}
        return values

    def run(function, values):
        in_graph = function.__name__ in OPERATIONS or function.__name__.endswith("_op")
        return graph(lambda: function(**values)) if in_graph else function(**values)

    unseen = arguments.without_effect(
        functions, usual, lambda name: rows_of(name, functions[name]), run
    )

    # The method of the tape, whose fourth argument is Horovod's.
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        x = tf.Variable([1.0, 2.0])
        y = x * x
    return unseen + arguments.without_effect(
        {"tape.gradient": tape.gradient},
        lambda name: {"target": y, "sources": x},
        lambda name: {
            "target": [y, y],
            "sources": [x],
            "output_gradients": tf.constant([2.0, 3.0]),
            "use_generic_names": NoEffect("the names of operations do not depend on variables"),
            "options": Outcomes(
                lambda: tuple(
                    tape.gradient(y, [tf.Variable(0.0)], unconnected_gradients=kind)
                    for kind in ("none", "zero")
                )
            ),
        },
        lambda function, values: function(**values),
    )


def test_every_argument_has_an_effect(pool):
    with pool.ranks(1) as job:
        assert job.run(check) == [[]]
