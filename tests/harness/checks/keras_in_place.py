"""``KerasState(rollback=False)`` with each Keras backend."""

import numpy as np
import pytest

from horoplug.common.objects import broadcast_object

keras = pytest.importorskip("keras")
hvd = pytest.importorskip("horoplug.keras")

X = np.ones([4, 3], "float32")


def make():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse")
    return hvd.elastic.KerasState(model, rollback=False, step=0)


def values(variables):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def same(first, second):
    return len(first) == len(second) and all(map(np.array_equal, first, second))


def update_in_part(state):
    with state._progress.update([], []):
        first = state.model.trainable_variables[0]
        first.assign(first * 0)
        raise ZeroDivisionError


def check_state():
    if keras.backend.backend() == "jax":
        with pytest.raises(ValueError, match="not possible with Keras' JAX backend: fit donates"):
            make()
        return
    state = make()
    model, optimizer = state.model, state.model.optimizer
    kept = [*model.trainable_variables, *optimizer.variables]
    state.sync()
    for _ in range(2):
        model.fit(X, X[:, :1], verbose=0)
        state.step += 1
        state.commit()
        saved = {id(variable) for variable, _ in state._saved_variables}
        assert not saved & {id(variable) for variable in kept}
        assert saved >= {id(variable) for variable in model.non_trainable_variables}
    # One rank makes a step more, and the other one takes it over.
    if hvd.rank() == 1:
        with state._progress.update([], model.trainable_variables):
            for variable in kept:
                variable.assign(variable + 1)
        state.step += 1
        state.save()
    else:
        with pytest.raises(ZeroDivisionError):
            update_in_part(state)
    expected = broadcast_object(values(kept), 1)
    state.restore()
    state.sync()
    assert same(values(kept), expected)
    assert state.step == 3
    # A new process has no state yet.
    if hvd.rank() == 0:
        state = make()
    state.sync()
    found = [*state.model.trainable_variables, *state.model.optimizer.variables]
    assert same(values(found), expected)
    assert state.step == 3


def check_loss_scaling():
    """The scale changes outside of updates, and returns to the last commit."""
    if keras.backend.backend() == "jax":
        return
    keras.config.set_dtype_policy("mixed_float16")
    try:
        state = make()
        assert isinstance(state.optimizer, keras.optimizers.LossScaleOptimizer)
        state.sync()
        for _ in range(20):
            state.model.fit(X, X[:, :1], verbose=0)
            state.commit()
            if int(state.optimizer.inner_optimizer.iterations):
                break  # a step that was not skipped
    finally:
        keras.config.set_dtype_policy("float32")
    inner = state.optimizer.inner_optimizer
    saved = {id(variable) for variable, _ in state._saved_variables}
    assert saved >= {id(state.optimizer.step_counter), id(state.optimizer.dynamic_scale)}
    assert not saved & {id(v) for v in [*state.model.trainable_variables, *inner.variables]}


CHECKS = [check_state, check_loss_scaling]
