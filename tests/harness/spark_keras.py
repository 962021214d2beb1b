"""Trains with KerasEstimator and checks the results: KERAS_BACKEND=… python -m tests.harness.spark_keras CASE FOLDER.

TensorFlow must not be imported in pytest's process, and a process has one backend of Keras."""

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.harness.spark_cluster import session
from tests.harness.spark_frames import columns
from tests.harness.support import seed

ROWS, VALIDATION = 48, 12


def frame(spark, numbers):
    """Columns x (array), kind (number of 4), y, w (0: y is wrong) and fold (validation)."""
    rows = []
    for number in range(ROWS + VALIDATION):
        # Bounded, so that no row of x outweighs its kind in a layer that learns both from so few rows.
        x = [float(value) for value in numbers.uniform(-0.5, 0.5, size=3)]
        right = number % 6 != 0
        y = 3 * x[0] - 1.5 * x[1] if right else 50.0
        rows.append((number, x, number % 4, y, float(right), number >= ROWS))
    schema = "id long, x array<double>, kind int, y double, w double, fold boolean"
    return spark.createDataFrame(rows, schema).repartition(3).persist()


def simple(keras, df, folder):
    """Two ranks train like one process, resume with the optimizer's state, transform and are saved."""
    from horoplug.spark.common.store import Store
    from horoplug.spark.keras import KerasEstimator, KerasModel

    def network():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((3,), name="x")
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(inputs)))

    from pyspark.sql import functions as F

    df = df.withColumn("y", F.least("y", F.lit(2.0)))
    x, y = columns(df, "x", "y")
    plain = network()
    plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", metrics=["mae"])
    expected = plain.fit(
        x[:ROWS],
        y[:ROWS, None],
        batch_size=ROWS,
        epochs=4,
        verbose=0,
        validation_data=(x[ROWS:], y[ROWS:, None]),
    ).history
    store = Store.create(str(folder / "store"))
    estimator = KerasEstimator(
        model=network(),
        store=store,
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.MeanSquaredError(),
        metrics=["mae"],
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=100,
        epochs=2,
        validation="fold",
        num_proc=2,
        verbose=2,
    )
    first = estimator.fit(df)
    with zipfile.ZipFile(
        store.get_localized_path(store.get_checkpoint_path(first.getRunId())) + ".keras"
    ) as archive:
        assert "horoplug.json" in archive.namelist()
    model = estimator.fit(df, {estimator.epochs: 4, estimator.run_id: first.getRunId()})
    history = model.getHistory()
    assert sorted(history) == sorted(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-3, err_msg=name)
        np.testing.assert_array_equal(history[name][:2], first.getHistory()[name])
    for mine, other in zip(model.getModel().get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)

    model.save(str(folder / "model"))
    loaded = KerasModel.load(str(folder / "model"))
    assert loaded.getHistory() == history
    output = loaded.setOutputCols(["b"]).transform(df.coalesce(1))
    assert output.columns == [*df.columns, "b"]
    (predicted,) = columns(output, "b")
    own = model.getModel().predict(x, verbose=0)[:, 0]
    np.testing.assert_allclose(predicted, own, rtol=1e-4, atol=1e-5)
    estimator.save(str(folder / "estimator"))
    again = KerasEstimator.load(str(folder / "estimator"))
    for mine, other in zip(again.getModel().get_weights(), network().get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert again.getLoss().name == estimator.getLoss().name
    assert again.getOptimizer().momentum == 0.9
    refusals(keras, df, estimator)


def refusals(keras, df, estimator):
    """Wrong input is one line."""
    from horoplug.spark.common.errors import EstimatorError

    class Own(keras.Model):
        def call(self, values):
            return values

    OfKeras2 = type("OfKeras2", (), {"__module__": "tf_keras.src.models"})
    built = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    for options, text in (
        ({"model": "net"}, "model='net': must be a keras.Model"),
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, "does not know its inputs: begin"),
        ({"model": Own()}, "custom_objects={'Own': Own}"),
        ({"loss": [OfKeras2()]}, "loss: a OfKeras2 of Keras 2 (tf_keras), and the estimator takes"),
        ({"model": OfKeras2()}, "model: a OfKeras2 of Keras 2 (tf_keras), and the estimator takes"),
        (
            {"model": built},
            "the model's inputs: column 'x' has 3 elements per row, which do not fit",
        ),
        ({"feature_cols": ["x", "y"]}, "the model has 1 inputs, and feature_cols has 2 columns"),
        ({"label_cols": ["x", "y"]}, "the model has 1 outputs, and label_cols has 2 columns"),
        ({"label_cols": ["z"]}, "the DataFrame has no column 'z'"),
        ({"loss": None}, "KerasEstimator needs loss"),
    ):
        with pytest.raises(EstimatorError) as caught:
            estimator.copy().setParams(**options).fit(df)
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)


def several(keras, df, folder):
    """Two inputs, two outputs, a label and a metric that are arrays, weights of rows, a layer of this program, a
    callback, and steps of two batches."""
    from pyspark.sql import functions as F

    import horoplug.keras as hvd
    from horoplug.spark.common.store import Store
    from horoplug.spark.keras import KerasEstimator

    df = df.withColumn("y", F.array("y", "y"))

    class Doubled(keras.layers.Layer):
        def call(self, values):
            return 2 * values

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            (folder / f"{hvd.rank()}.txt").write_text(f"{epoch} {sorted(logs)}")

    class Shares(keras.metrics.Metric):
        """The number of rows of each class."""

        def __init__(self, name="shares", dtype=None):
            super().__init__(name=name, dtype=dtype)
            self.rows = self.add_weight(shape=(4,), initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            classes = keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32")
            self.rows.assign(self.rows + keras.ops.sum(keras.ops.one_hot(classes, 4), axis=0))

        def result(self):
            return self.rows / keras.ops.sum(self.rows)

    def error(truth, output):
        return keras.ops.mean(keras.ops.abs(truth - output), axis=-1)

    keras.utils.set_random_seed(1)
    x, kind = keras.Input((3, 1), name="x"), keras.Input((1,), dtype="int32", name="kind")
    flat = keras.layers.Flatten()
    body = keras.layers.Concatenate()(
        [flat(Doubled()(x)), flat(keras.layers.Embedding(4, 4)(kind))]
    )
    hidden = keras.layers.Dense(8, "tanh")(body)
    # The class is learned without the hidden layer, which some initial values saturate: in 3 of 150 trainings the
    # accuracy stayed below 1.
    outputs = [
        keras.layers.Dense(2, name="value")(hidden),
        keras.layers.Dense(4, "softmax", name="class")(body),
    ]
    model = keras.Model([x, kind], outputs)
    estimator = KerasEstimator(
        model=model,
        store=Store.create(f"file://{folder}/store", save_runs=False),
        optimizer=keras.optimizers.Adam(0.05),
        loss=[error, "sparse_categorical_crossentropy"],
        loss_weights=[1.0, 0.5],
        metrics=[[], ["accuracy", Shares()]],
        custom_objects={"Doubled": Doubled, "error": error, "Shares": Shares},
        feature_cols=["x", "kind"],
        label_cols=["y", "kind"],
        sample_weight_col="w",
        validation=0.25,
        validation_steps_per_epoch=1,
        train_steps_per_epoch=20,
        batch_size=8,
        epochs=8,
        backward_passes_per_step=2,
        gradient_compression=hvd.Compression.fp16,
        random_seed=4,
        callbacks=[Seen()],
        num_proc=2,
        verbose=0,
    )
    trained = estimator.fit(df)
    history = trained.getHistory()
    assert len(history["loss"]) == 8
    assert history["loss"][-1] < history["loss"][0] / 3
    assert history["class_accuracy"][-1] == 1
    assert history["val_class_accuracy"][-1] == 1
    assert np.shape(history["class_shares"]) == (8, 4)
    np.testing.assert_allclose(np.sum(history["class_shares"], 1), 1, rtol=1e-5)
    for rank in (0, 1):
        assert (folder / f"{rank}.txt").read_text() == f"7 {sorted(history)}"
    assert not (folder / "store" / "runs").exists() or not any(
        (folder / "store" / "runs").iterdir()
    )
    output = trained.transform(df.coalesce(1))
    assert dict(output.dtypes)["kind__output"] == "vector"
    assert dict(output.dtypes)["y__output"] == "array<double>"
    names = ("kind__output", "kind", "y__output", "y", "w")
    classes, kinds, predicted, y, w = columns(output, *names)
    assert (classes.argmax(1) == kinds).all()
    assert np.abs(predicted - y)[w == 1].mean() < 0.4


def main():
    import keras

    folder = Path(sys.argv[2])
    with session("local[2]", folder / "spark") as spark:
        df = frame(spark, np.random.default_rng(seed()))
        {"simple": simple, "several": several}[sys.argv[1]](keras, df, folder)


if __name__ == "__main__":
    main()
