"""Training with DistributedOptimizer of TensorFlow 1."""

import numpy as np
import pytest

from tests.harness import adasum_reference

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

train_v1 = tf.compat.v1.train


class Model:
    """An embedding, whose gradient is a tf.IndexedSlices, and two layers. One variable is unused."""

    def __init__(self, key):
        random = np.random.default_rng(key)
        shapes = [(5, 3), (3, 4), (4, 1), (1,)]
        self.variables = [tf.Variable(random.normal(size=s).astype("float32")) for s in shapes]

    def loss(self, ids, y):
        embedding, first, second, _ = self.variables
        x = tf.tanh(tf.gather(embedding, ids) @ first)
        return tf.reduce_mean((x @ second - y) ** 2)


def batches(key, steps):
    """The batches of all ranks for each step. Each contains all ids, because an optimizer skips rows without a
    gradient."""
    random = np.random.default_rng(key)
    made = []
    for _ in range(steps):
        ids = [
            random.permutation([*range(5), *random.integers(0, 5, 3)]) for _ in range(hvd.size())
        ]
        made.append([(i, np.cos(i, dtype="float32")[:, None]) for i in ids])
    return made


def run(mode, model_of, optimizer_of, data, watch=lambda optimizer, model: None):
    """Trains on batches. Returns the variables, the counted steps, and the values that ``watch`` has returned."""
    if mode == "graph":
        with tf.Graph().as_default():
            model, optimizer = model_of(), optimizer_of()
            ids, y = (
                tf.compat.v1.placeholder(tf.int64, [None]),
                tf.compat.v1.placeholder("float32", [None, 1]),
            )
            count = tf.Variable(0, dtype=tf.int64)
            step = optimizer.minimize(model.loss(ids, y), global_step=count)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(tf.compat.v1.local_variables_initializer())
                for i, label in data:
                    session.run(step, {ids: i, y: label})
                wanted = [model.variables, count, watch(optimizer, model) or []]
                return session.run(wanted)
    model, optimizer, count = model_of(), optimizer_of(), tf.Variable(0, dtype=tf.int64)

    def step(ids, y):
        optimizer.minimize(lambda: model.loss(ids, y), count, model.variables)

    step = tf.function(step) if mode == "function" else step
    for ids, y in data:
        step(tf.constant(ids), tf.constant(y))
    seen = watch(optimizer, model) or []
    return [v.numpy() for v in model.variables], count.numpy(), [s.numpy() for s in seen]


def joined(parts):
    return tuple(np.concatenate(each) for each in zip(*parts, strict=True))


def same_bits(variables):
    bits = hvd.allgather_object([v.tobytes() for v in variables])
    assert all(b == bits[0] for b in bits), "ranks have different bits"


def momentum():
    return train_v1.MomentumOptimizer(0.3, 0.9)


OPTIONS = {
    "plain": {},
    "dense": {"sparse_as_dense": True, "gradient_predivide_factor": 2.0},
    "groups": {"num_groups": 2, "name": "Named"},
}


def check_training(key, mode):
    data = batches(key, 4)
    mine = [parts[hvd.rank()] for parts in data]
    expected, *_ = run(mode, lambda: Model(key), momentum, [joined(parts) for parts in data])
    start = Model(key).variables[0].numpy()
    assert abs(expected[0] - start).max() > 0.02, "it has trained"
    for options in OPTIONS.values():
        found, count, slots = run(
            mode,
            lambda: Model(key),
            lambda o=options: hvd.DistributedOptimizer(momentum(), **o),
            mine,
            lambda optimizer, model: [optimizer.get_slot(model.variables[1], "momentum")],
        )
        assert count == len(data)
        assert slots[0].shape == (3, 4)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, 1e-5, 1e-5)
        same_bits(found)


def check_several_backward_passes(key, mode):
    """Three batches for each step equal one batch with three times the loss, or with their mean loss."""
    data = batches(key, 7)  # one more than two steps need
    mine = [parts[hvd.rank()] for parts in data]
    for average in (False, True):
        model, optimizer = Model(key), momentum()
        for place in (0, 3):
            three = [joined(parts) for parts in data[place : place + 3]]
            factor = 1 / 3 if average else 1.0
            optimizer.minimize(
                lambda three=three, f=factor, m=model: f * sum(m.loss(*batch) for batch in three),
                var_list=model.variables,
            )

        def make(average=average):
            return hvd.DistributedOptimizer(
                momentum(),
                backward_passes_per_step=3,
                average_aggregated_gradients=average,
                sparse_as_dense=True,
            )

        found, count, _ = run(mode, lambda: Model(key), make, mine)
        assert count == 7
        for one, other in zip(found, model.variables, strict=True):
            np.testing.assert_allclose(one, other, 1e-5, 1e-5)


def check_adasum(key, mode):
    """Adasum combines each rank's own steps by its formula and does not change the momentum."""
    for every in (1, 2):
        data = batches(key, 2 * every)
        models = [Model(key) for _ in range(hvd.size())]
        optimizers = [momentum() for _ in models]
        for turn in range(2):
            before = [v.numpy() for v in models[0].variables]
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                for parts in data[turn * every : (turn + 1) * every]:
                    optimizer.minimize(
                        lambda m=model, p=parts[rank]: m.loss(*p), var_list=model.variables
                    )
            for place, start in enumerate(before):
                deltas = [model.variables[place].numpy() - start for model in models]
                for model in models:
                    model.variables[place].assign(start + adasum_reference.adasum(deltas))
        found, count, _ = run(
            mode,
            lambda: Model(key),
            lambda e=every: hvd.DistributedOptimizer(
                momentum(), op=hvd.Adasum, backward_passes_per_step=e
            ),
            [parts[hvd.rank()] for parts in data],
        )
        assert count == len(data)
        for one, other in zip(found, models[0].variables, strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-5)


def check_sessions():
    """Training as in TensorFlow 1, with the variables broadcast from rank 0."""
    rank, size = hvd.rank(), hvd.size()
    with tf.Graph().as_default():
        weight = tf.compat.v1.get_variable("w", initializer=tf.constant([rank + 1.0, 5.0]))
        optimizer = hvd.DistributedOptimizer(train_v1.AdamOptimizer(0.1), use_locking=True)
        step = train_v1.get_or_create_global_step()
        pairs = optimizer.compute_gradients(tf.reduce_sum(weight**2) * (rank + 1.0))
        train = optimizer.apply_gradients(pairs, global_step=step)
        assert optimizer.get_name() == "DistributedAdamOptimizer"
        assert optimizer.get_slot_names() == ["m", "v"]
        assert optimizer.get_slot(weight, "m").shape == (2,)
        assert len(optimizer.variables()) == 4
        hooks = [hvd.BroadcastGlobalVariablesHook(0), train_v1.StopAtStepHook(3)]
        with train_v1.MonitoredTrainingSession(hooks=hooks) as session:
            (gradient,) = session.run([pairs[0][0]])
            np.testing.assert_allclose(gradient, [size + 1.0, 5 * (size + 1)], 1e-6)
            while not session.should_stop():
                _, value = session.run([train, weight])
        values = hvd.allgather_object(value.tolist())
        assert values == [values[0]] * size


def check_helpers():
    size, rank = hvd.size(), hvd.rank()
    a, b = tf.Variable([1.0]), tf.Variable([2.0])
    assert hvd.refs_to_vars(hvd.vars_to_refs([a, [b]]))[1][0] is b
    arguments = ["made", "", "", hvd.Compression.none, False, hvd.Average, 1.0, [[a, b]]]
    reduce = hvd._make_cached_allreduce_grads_fn(*arguments)
    assert hvd._make_cached_allreduce_grads_fn(*arguments, hvd.global_process_set) is not None
    for function in (reduce, hvd._make_allreduce_grads_fn(*arguments)):
        one, two = function([tf.fill([1], rank + 1.0), tf.ones([1])], [a, b])
        assert one.numpy() == (size + 1) / 2
        assert two.numpy() == 1
        assert function([tf.ones([1])])[0].numpy() == 1
    assert hvd.handle_average_backwards_compatibility(None, False) == hvd.Sum
    assert hvd._executing_eagerly()
    assert not tf.function(hvd._executing_eagerly)()
    assert hvd.gpu_available("tensorflow") == bool(tf.config.list_physical_devices("GPU"))
    hvd.check_num_rank_power_of_2(4)
    with pytest.raises(NotImplementedError):
        hvd.check_num_rank_power_of_2(3)

    helper = hvd.LocalGradientAggregationHelper(2, lambda grads, _: grads, False, False)
    with pytest.raises(ValueError, match="sparse_as_dense"):
        helper.compute_gradients([tf.IndexedSlices(tf.ones([1]), [0], [2])], [a])
