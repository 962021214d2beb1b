"""Tapes, variables and objects."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from tests.api.horovod_tensorflow_api.matrix import MOVED


def differentiate(**options):
    """The reduced gradients of x * (rank + 1) and of x[0]."""
    x, y = tf.Variable([1.0, 2.0]), tf.Variable([[3.0], [4.0]])
    sources = [x, y]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x) * (hvd.rank() + 1) + tf.reduce_sum(tf.gather(y, [0]))
    return hvd.DistributedGradientTape(tape, **options).gradient(loss, sources), sources


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"op": hvd.Sum},
        {"sparse_as_dense": True},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"num_groups": 1},
        {"groups": 2},
    ],
    ids=str,
)
def test_distributed_tape_reduces_gradients(options):
    (grad_x, grad_y), _ = differentiate(**options)
    size = hvd.size()
    factor = size if options.get("op") == hvd.Sum else 1
    assert np.allclose(grad_x, (size + 1) / 2 * factor)
    assert np.allclose(tf.convert_to_tensor(grad_y), [[factor], [0]])


def test_distributed_tape_without_gradients():
    x = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = tf.constant(1.0)
    assert hvd.DistributedGradientTape(tape).gradient(loss, [x]) == [None]


def test_invalid_tape_arguments_are_refused():
    x = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
    with pytest.raises(ValueError, match="groups"):
        hvd.DistributedGradientTape(tape, groups=-1)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedGradientTape(tape, gradient_predivide_factor=2.0, op=hvd.Sum)


@pytest.mark.parametrize("scale", [True, False])
def test_local_sources_are_not_reduced(scale):
    x, y = tf.Variable(1.0), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = (x + y) * float(hvd.rank() + 1)
    tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
    tape.register_local_source(y)
    grad_x, grad_y = tape.gradient(loss, [x, y])
    assert np.isclose(grad_x, (hvd.size() + 1) / 2)
    assert np.isclose(grad_y, (hvd.rank() + 1) / (hvd.size() if scale else 1))


def test_partial_tape():
    for local in range(3):
        layers = [tf.keras.layers.Dense(2, kernel_initializer="ones") for _ in range(3)]
        model = tf.keras.Sequential(layers)
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(model(tf.ones([1, 3]) * (hvd.rank() + 1)))
        own = tape.gradient(loss, model.trainable_weights)
        partial = hvd.PartialDistributedGradientTape(tape, local_layers=layers[:local])
        reduced = partial.gradient(loss, model.trainable_weights)
        for place, (a, b) in enumerate(zip(own, reduced, strict=True)):
            if place < 2 * local:
                assert np.allclose(a, hvd.size() * b)
            else:
                total = hvd.allreduce(a, op=hvd.Average, name=f"check{local}.{place}")
                assert np.allclose(total, b)


@pytest.mark.parametrize("inplace", [False, True])
def test_broadcast_variables_overwrites_values(inplace):
    for dtype in MOVED:
        value = np.full(5, hvd.rank() % 2, dtype.as_numpy_dtype)
        variables = [tf.Variable(value) for _ in range(3)]
        root = hvd.size() - 1
        hvd.broadcast_variables(variables, root_rank=root, inplace=inplace)
        for variable in variables:
            assert np.array_equal(variable, np.full(5, root % 2, dtype.as_numpy_dtype))


def test_broadcast_variables_in_a_tensorflow_1_graph():
    """Resource variables and TensorFlow 1's own."""
    for use_resource in (True, False):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tf.compat.v1.get_variable(
                "x", initializer=[float(hvd.rank())], use_resource=use_resource
            )
            broadcast = hvd.broadcast_global_variables(root_rank=0)
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(broadcast)
            assert session.run(tf.compat.v1.global_variables()[0]).tolist() == [0.0]


def test_broadcast_in_place_overwrites_variables():
    variables = [tf.Variable([float(hvd.rank())] * 2), tf.Variable(hvd.rank())]
    hvd.broadcast_(variables, root_rank=0, name="in_place")
    assert variables[0].numpy().tolist() == [0, 0]
    assert variables[1].numpy() == 0


def test_broadcast_and_allgather_of_objects():
    expected = {"hello": 123, 0: [1, 2]}
    assert hvd.broadcast_object(expected if hvd.rank() == 0 else {}, root_rank=0) == expected
    assert hvd.broadcast_object_fn(root_rank=0)(expected if hvd.rank() == 0 else {}) == expected
    own = {"metric": hvd.rank(), **({"more": 42} if hvd.rank() == 1 else {})}
    gathered = hvd.allgather_object(own)
    assert [g["metric"] for g in gathered] == [*range(hvd.size())]
    assert [g.get("more") for g in gathered] == [
        42 if rank == 1 else None for rank in range(hvd.size())
    ]


def test_helper_functions():
    from horovod.tensorflow.util import _executing_eagerly, refs_to_vars, vars_to_refs

    assert _executing_eagerly()
    assert hvd._executing_eagerly()
    assert hvd.util._executing_eagerly()
    with tf.Graph().as_default():
        assert not hvd._executing_eagerly()
    variables = [tf.Variable(1.0), tf.Variable(2.0)]
    back = refs_to_vars(vars_to_refs(variables))
    assert all(a is b for a, b in zip(variables, back, strict=True))
