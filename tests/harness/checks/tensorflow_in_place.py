"""``TensorFlowState`` and ``TensorFlowKerasState`` with ``rollback=False``: processes keep their parameters after a
failure. With Keras 3, and with Keras 2, which tf.keras is in processes with TF_USE_LEGACY_KERAS=1."""

import numpy as np
import pytest

from horoplug.base.log import logger

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

WRITES = ("Assign", "ResourceApply", "ResourceScatter")
X = np.ones([4, 3], "float32")


def make(kind="tape"):
    """A state, and a function that makes a step of the training."""
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.layers.Dense(4, use_bias=False), tf.keras.layers.BatchNormalization()]
    model = tf.keras.Sequential([tf.keras.Input((3,)), *layers, tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.Adam(0.1)
    groups = {"groups": 3}  # several reductions of a step
    if kind == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, **groups)
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, rollback=False, step=0)

    @tf.function
    def step(x):
        metric = hvd.allreduce(tf.reduce_sum(x), name="before")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        if kind == "tape":
            tape = hvd.DistributedGradientTape(tape, **groups)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return metric + hvd.allreduce(loss, name="after")

    return state, step


def values(state, kept=True):
    """The values of the variables that are kept in place, or of the others."""
    variables = [v for v in state._all_variables() if state._progress.owns(v) == kept]
    return [tf.convert_to_tensor(v).numpy() for v in variables]


def same(first, second):
    return len(first) == len(second) and all(map(np.array_equal, first, second))


# ---- the promise ----------------------------------------------------------------------------------------------------


def ancestors(op):
    found, queue = set(), [op]
    while queue:
        each = queue.pop()
        for before in [*each.control_inputs, *(tensor.op for tensor in each.inputs)]:
            if before not in found:
                found.add(before)
                queue.append(before)
    return found


def writes_of(state, graph):
    """The operations of a graph that write variables which are kept in place. (Not those of moving averages, which the
    forward pass changes.)"""
    kept = [v for v in state._all_variables() if state._progress.owns(v)]
    kept += state._progress._count
    handles = [v.handle if isinstance(v, tf.Variable) else v.value.handle for v in kept]
    handles = {id(handle) for handle in handles}
    inner = {id(internal) for handle, internal in graph.captures if id(handle) in handles}
    ops = graph.get_operations()
    return [op for op in ops if op.type.startswith(WRITES) and id(op.inputs[0]) in inner]


def check_update_in_a_function_of_its_own_waits_for_all_gradients():
    state, _ = make()
    variables = state.model.trainable_variables

    @tf.function
    def update(gradients):
        state.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    graph = update.get_concrete_function([tf.TensorSpec(v.shape) for v in variables]).graph
    gradients = {tensor.op for tensor in graph.inputs[: len(variables)]}
    writes = writes_of(state, graph)
    assert len(writes) >= len(variables) * 3 + 3
    for write in writes:
        assert gradients <= ancestors(write), write.name


def check_order_of_operations_and_updates(kind):
    state, step = make(kind)
    graph = step.get_concrete_function(tf.TensorSpec([4, 3])).graph
    ops = graph.get_operations()
    reductions = {op for op in ops if op.type.startswith("Horovod")}
    after = {op for op in reductions if op.name == "after"}
    assert len(after) == 1
    assert len(reductions) >= 5
    writes = writes_of(state, graph)
    assert len(writes) >= len(state.model.trainable_variables) * 3 + 3
    for write in writes:
        assert reductions - after <= ancestors(write), write.name
    assert set(writes) <= ancestors(after.pop())
    last = [write for write in writes if set(writes) - {write} <= ancestors(write)]
    assert len(last) == 1  # that of the number of updates that have ended


def check_commit_copies_only_what_the_optimizer_does_not_change(kind):
    state, step = make(kind)
    state.sync()
    for _ in range(2):
        step(X)
        state.commit()
    saved = {id(variable) for variable, _ in state._saved_variables}
    assert saved == {id(variable) for variable in state.model.non_trainable_variables}
    before = values(state), values(state, kept=False)
    step(X)
    changed = values(state)
    state.restore()
    assert same(values(state), changed)
    assert not same(values(state), before[0])
    assert same(values(state, kept=False), before[1])  # moving averages


# ---- after a failure ------------------------------------------------------------------------------------------------


def step_alone(state):
    """A step of this rank alone."""
    variables = state.model.trainable_variables
    gradients = [tf.ones_like(variable) for variable in variables]
    state.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    state.step += 1
    state.save()


def check_rank_that_is_behind_takes_over_the_state_of_the_other(ahead):
    state, _ = make()
    state.sync()
    step_alone(state)
    step_alone(state)
    if hvd.rank() == ahead:
        step_alone(state)
    else:
        state._progress._count[0].assign_add(1)  # a step that has ended half-way
        first = state.model.trainable_variables[0]
        first.assign(tf.zeros_like(first))
    expected = hvd.broadcast_object(values(state), ahead)
    state.restore()
    state.sync()
    assert same(values(state), expected)
    assert state.step == 3
    state._take_over = None  # not called: nothing is left to do
    state.sync()
    state.commit()


def check_rank_whose_step_has_ended_half_way_takes_over_the_state_of_the_other():
    state, _ = make()
    state.sync()
    step_alone(state)
    commits = state._progress.commits
    if hvd.rank() == 0:
        state._progress._count[0].assign_add(1)
    else:
        step_alone(state)
        state._progress.commits = commits  # as if it had not committed
        state._progress._at_commit = 1, 1
    expected = hvd.broadcast_object(values(state), 1)
    state.restore()
    state.sync()
    assert same(values(state), expected)


def check_training_ends_with_an_error_if_no_rank_has_a_whole_step():
    state, _ = make()
    state.sync()
    step_alone(state)
    state._progress._count[0].assign_add(1)
    with pytest.raises(RuntimeError, match="no process has the parameters of a whole step"):
        state.sync()


def check_ranks_begin_with_the_state_of_rank_0_without_a_warning():
    said = []
    logger.warning = lambda text, *args: said.append(text % args)
    try:
        state, _ = make()
        first = state.model.trainable_variables[0]
        first.assign(tf.fill(first.shape, float(hvd.rank())))
        state.sync()
    finally:
        del logger.warning
    assert not np.any(tf.convert_to_tensor(first))
    assert said == []


# ---- what is refused ------------------------------------------------------------------------------------------------


def check_what_cannot_be_promised_is_refused():
    State, KerasState = hvd.elastic.TensorFlowState, hvd.elastic.TensorFlowKerasState
    with pytest.raises(ValueError, match="needs optimizer="):
        State([tf.Variable(1.0)], rollback=False)
    plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    with pytest.raises(ValueError, match="needs an optimizer of Keras, got GradientDescent"):
        State([tf.Variable(1.0)], optimizer=plain, rollback=False)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="a graph of TensorFlow 1"):
        State([tf.Variable(1.0)], optimizer=tf.keras.optimizers.SGD(0.1), rollback=False)
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    adding = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="does not support gradients that the optimizer accum"):
        KerasState(model, adding, rollback=False)
    _, step = make()
    with pytest.raises(ValueError, match="functions that XLA compiles"):
        tf.function(step.python_function, jit_compile=True)(X)


def check_function_that_was_traced_before_the_state_was_created_is_found():
    state, step = make("optimizer")
    object.__delattr__(state.optimizer, "_horoplug_progress")
    step(X)
    later = hvd.elastic.TensorFlowKerasState(state.model, state.optimizer, rollback=False)
    later.sync()
    step(X)
    with pytest.raises(ValueError, match="traced before the state was created"):
        later.commit()


def check_variables_of_any_kind_with_an_optimizer():
    """Those that the optimizer updates are kept, and others return to the commit."""
    weight, other = tf.Variable([1.0, 2.0]), tf.Variable(5.0, trainable=False)
    optimizer = tf.keras.optimizers.SGD(0.5)
    state = hvd.elastic.TensorFlowState(
        [weight, other], optimizer=optimizer, rollback=False, step=0
    )
    state.sync()
    for _ in range(2):
        optimizer.apply_gradients([(tf.ones(2), weight)])
        other.assign_add(1)
        state.commit()
    optimizer.apply_gradients([(tf.ones(2), weight)])
    other.assign_add(1)
    state.restore()
    assert weight.numpy().tolist() == [-0.5, 0.5]
    assert other.numpy() == 7


CHECKS = [
    (check_update_in_a_function_of_its_own_waits_for_all_gradients,),
    *((check_order_of_operations_and_updates, kind) for kind in ("tape", "optimizer")),
    *(
        (check_commit_copies_only_what_the_optimizer_does_not_change, kind)
        for kind in ("tape", "optimizer")
    ),
    *((check_rank_that_is_behind_takes_over_the_state_of_the_other, ahead) for ahead in (0, 1)),
    (check_rank_whose_step_has_ended_half_way_takes_over_the_state_of_the_other,),
    (check_training_ends_with_an_error_if_no_rank_has_a_whole_step,),
    (check_ranks_begin_with_the_state_of_rank_0_without_a_warning,),
    (check_what_cannot_be_promised_is_refused,),
    (check_function_that_was_traced_before_the_state_was_created_is_found,),
    (check_variables_of_any_kind_with_an_optimizer,),
]
"""Functions and their arguments, for jobs of two ranks."""
