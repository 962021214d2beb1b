"""SyncBatchNormalization compared with one batch of all ranks."""

import functools

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")


def results(layers, x, weights, compiled, **options):
    """Outputs, gradients and moving averages of two layers, one of which is used twice."""
    one, two = layers

    def compute(x):
        variables = [*one.trainable_variables, *two.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = one(x, training=True, **options) * 2.0 + two(x, training=True, **options)
            y = one(tf.tanh(y), training=True, **options)
            loss = tf.reduce_sum(tf.cast(y, "float64") * weights)
        return [y, *tape.gradient(loss, [x, *variables])]

    found = (tf.function(compute) if compiled else compute)(x)
    return found, [*one.non_trainable_variables, *two.non_trainable_variables]


def layers_of(kind, key, shape, **options):
    # The names of layers may differ between ranks.
    made = [kind(name=f"layer{number}_of_{hvd.rank()}", **options) for number in range(2)]
    for number, layer in enumerate(made):
        layer.build(shape)
        random = np.random.default_rng([key, number])
        for weight in layer.weights:  # a variance is positive
            weight.assign(random.uniform(0.5, 2, weight.shape))
    return made


CASES = {
    "plain": ([4, 3], {}, {}),
    "images": ([4, 2, 5, 3], {"momentum": 0.7, "epsilon": 0.01}, {}),
    "channels first": ([4, 3, 5], {"axis": 1}, {}),
    "bare": ([4, 3], {"center": False, "scale": False}, {}),
    "float64": ([4, 3], {"dtype": "float64"}, {}),
    "float16": ([4, 3], {"dtype": "mixed_float16"}, {}),
    "masked": ([4, 6, 3], {}, {"mask": True}),
    "uneven": ([0, 3], {}, {}),
}


def check_as_one_batch(key, compiled):
    size, rank = hvd.size(), hvd.rank()
    unfused = {} if hasattr(tf.keras, "config") else {"fused": False}
    for name, (shape, options, call) in CASES.items():
        random = np.random.default_rng([key, len(name)])
        # "uneven": ranks have 0, 5 and 10 rows.
        rows = [5 * r + (size == 1) * 2 if shape[0] == 0 else shape[0] for r in range(size)]
        whole = random.normal(3, 2, size=(sum(rows), *shape[1:]))
        weights = random.normal(size=whole.shape)
        mask = random.integers(0, 2, whole.shape[:2]) > 0
        begin = sum(rows[:rank])
        mine = np.s_[begin : begin + rows[rank]]
        kind = "float64" if name == "float64" else "float16" if name == "float16" else "float32"

        # In Keras 2, only the fused layer applies Bessel's correction to the moving variance.
        plain = functools.partial(tf.keras.layers.BatchNormalization, **unfused)

        def run(
            layer,
            part,
            compiled,
            call=call,
            whole=whole,
            weights=weights,
            mask=mask,
            kind=kind,
            options=options,
        ):
            made = layers_of(layer, key, [None, *whole.shape[1:]], **options)
            given = {"mask": tf.constant(mask[part])} if call else {}
            return results(made, tf.constant(whole[part], kind), weights[part], compiled, **given)

        expected, moving = run(plain, np.s_[:], False)
        found, my_moving = run(hvd.SyncBatchNormalization, mine, compiled)
        tolerance = {"float64": 1e-9, "float16": 2e-2}.get(kind, 1e-4)

        def close(one, other, tolerance=tolerance, name=name):
            scale = max(1.0, np.abs(other).max(initial=0))
            np.testing.assert_allclose(one, other, tolerance, tolerance * scale, err_msg=name)

        assert found[0].dtype == expected[0].dtype
        close(found[0], expected[0].numpy()[mine])
        close(found[1], expected[1].numpy()[mine])
        for ours, all_of_it in zip(found[2:], expected[2:], strict=True):
            close(hvd.allreduce(tf.convert_to_tensor(ours), op=hvd.Sum), all_of_it)
        for ours, all_of_it in zip(my_moving, moving, strict=True):
            close(ours, all_of_it)
