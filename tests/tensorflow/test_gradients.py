"""Gradients of the operations, compared with explicit formulas, and distributed gradient tapes."""

import numpy as np
import pytest

from tests.harness.cases import gradient_test
from tests.harness.checks.tensorflow_gradients import (
    check_allgather_gradient,
    check_allreduce_gradient,
    check_alltoall_gradient,
    check_broadcasts,
    check_local_layers,
    check_old_graphs,
    check_reducescatter_gradient,
    check_tape,
    check_training,
    close,
    gradient,
    normal,
)
from tests.harness.gradient_reference import GROUPED, KINDS, case
from tests.harness.support import ranks_fixture, seed

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "ab", "aab")


def check_broadcast_gradient(key):
    size, rank = hvd.size(), hvd.rank()
    weights = normal(key, size, 4)
    for root in range(size):
        expected = weights.mean(0) if rank == root else np.zeros(4)
        close(gradient(lambda x, r=root: hvd.broadcast(x, r) * weights[rank], tf.ones(4)), expected)


test_gradient = pytest.mark.short("aa*")(
    gradient_test(
        check_allreduce_gradient,
        check_allgather_gradient,
        check_broadcast_gradient,
        check_alltoall_gradient,
        check_reducescatter_gradient,
    )
)


def check_second_gradient():
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as outer:
        outer.watch(x)
        first = 0.0
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(hvd.allreduce(x, op=hvd.Average) ** 3)
        first = inner.gradient(y, x)
    close(outer.gradient(first, x), 6 * x)


def test_second_derivative(ranks):
    ranks.run(check_second_gradient)


def check_complex_gradients(key):
    """First and second derivatives, in eager mode and in a graph."""
    size, rank = hvd.size(), hvd.rank()
    for kind in KINDS:
        values = case(kind, size, key)

        def one(x, kind=kind):
            return getattr(hvd, kind.operation)(x, **kind.options)

        def of_group(x, kind=kind):
            others = [] if "op" in kind.options else [tf.constant([True])]
            group = [*others, tf.range(2 * size), x]
            return getattr(hvd, f"grouped_{kind.operation}")(group, **kind.options)[-1]

        x, direction, factor, square = (
            tf.constant(of_all[rank], tf.complex128)
            for of_all in (values.inputs, values.directions, values.factors, values.squares)
        )
        for operation in (one, of_group) if kind.operation in GROUPED else (one,):

            def compute(x, operation=operation, factor=factor, square=square, direction=direction):
                with tf.GradientTape() as outer:
                    outer.watch(x)
                    with tf.GradientTape() as inner:
                        inner.watch(x)
                        y = operation(x)
                        z = factor * y + square * y * tf.math.conj(y) / 2
                        loss = tf.reduce_sum(tf.math.real(z))
                    gradient = inner.gradient(loss, x)
                    product = tf.reduce_sum(tf.math.real(gradient * tf.math.conj(direction)))
                return gradient, outer.gradient(product, x)

            for compiled in (tf.function(compute), compute):
                gradient, second = compiled(x)
                close(gradient, values.gradients[rank])
                close(second, values.second[rank])


def test_complex_gradients_match_central_differences(pool):
    with pool.ranks(2) as job:
        job.run(check_complex_gradients, seed())


# ---- tapes ----------------------------------------------------------------------------------------------------------


OPTIONS = {
    "plain": {},
    "dense": {"sparse_as_dense": True},
    "predivided": {"gradient_predivide_factor": 2.0},
    "groups": {"num_groups": 2},
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.short("aa-plain-*")
def test_training_equals_training_on_one_rank(ranks, options, compiled):
    ranks.run(check_training, seed() % 10000, OPTIONS[options], compiled)


@pytest.mark.short("aa*")
def test_distributed_tape(ranks):
    ranks.run(check_tape)


def check_groups():
    """The number of gradients in each operation, and the order of the operations."""
    count = 5
    sources = [tf.Variable(tf.ones([100_000 if n == 1 else n + 2])) for n in range(count)]
    a, b, c, *_ = sources

    def groups_of(**options):
        @tf.function
        def step():
            with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
                loss = tf.add_n([tf.reduce_sum(v) * (n + 1.0) for n, v in enumerate(sources)])
            return tape.gradient(loss, sources)

        for n, found in enumerate(step()):
            np.testing.assert_array_equal(found, np.full(found.shape, n + 1.0))
        found = []
        for node in step.get_concrete_function().graph.get_operations():
            if node.type in ("HorovodAllreduce", "HorovodGroupedAllreduce"):
                found.append([tensor.shape[0] - 2 for tensor in node.inputs])
        return found

    large = 100_000 - 2
    assert groups_of(num_groups=2) == groups_of(groups=2) == [[0, large], [2, 3, 4]]
    assert groups_of(groups=9) == [[0], [large], [2], [3], [4]]
    assert groups_of(groups=[[c, a], [b]]) == [[0, 2], [large], [3], [4]]
    assert groups_of() == [
        [4, 3, 2, large, 0]
    ]  # the gradients of the last variables are computed first
    sources[3] = tf.Variable(tf.ones([400_000]))
    assert groups_of() == [[4, 400_000 - 2], [2, large, 0]]


def test_gradients_of_one_operation(ranks):
    ranks.run(check_groups)


def check_process_set():
    """Ranks outside of the process set keep their gradients; its members get the average over the set."""
    rank = hvd.rank()
    part = hvd.add_process_set([0, 2])
    a, b = tf.Variable([1.0]), tf.Variable([2.0])
    slices = tf.Variable([[1.0], [2.0]])
    for sparse_as_dense in (False, True):
        with tf.GradientTape() as tape:
            loss = (a + b) * (rank + 1.0) + tf.gather(slices, [1])
        tape = hvd.DistributedGradientTape(tape, process_set=part, sparse_as_dense=sparse_as_dense)
        tape.register_local_source(b)
        of_a, of_b, of_slices = tape.gradient(loss, [a, b, slices])
        close(of_a, [2.0 if rank in (0, 2) else rank + 1.0])
        close(of_b, [(rank + 1) / 2])
        close(tf.convert_to_tensor(of_slices), [[0], [1]])
        if rank in (0, 2):
            assert isinstance(of_slices, tf.Tensor) == sparse_as_dense
    with tf.GradientTape() as tape:
        loss = tf.gather(slices, [1]) * (rank + 1.0)
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(slices)
    close(tf.convert_to_tensor(tape.gradient(loss, slices)), [[0], [(rank + 1) / 3]])

    objects = hvd.allgather_object(rank, process_set=part) if part.included() else None
    assert objects in (None, [0, 2])
    if part.included():
        assert hvd.broadcast_object(rank, 2, process_set=part) == 2
    hvd.remove_process_set(part)


def test_tape_with_process_set(pool):
    with pool.ranks(3) as job:
        job.run(check_process_set)


@pytest.mark.short("aa*")
def test_local_layers_are_not_reduced(ranks):
    ranks.run(check_local_layers)


# ---- variables and objects ------------------------------------------------------------------------------------------


@pytest.mark.short("aa*")
def test_broadcast_of_variables_and_objects(ranks):
    ranks.run(check_broadcasts)


@pytest.mark.short("aa*")
def test_broadcast_in_tensorflow_1_graphs(ranks):
    ranks.run(check_old_graphs)
