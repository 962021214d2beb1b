"""TorchEstimator on a real session: training on two ranks, resuming, transform, saving, and wrong input."""

import io
import json
import re
import threading

import numpy as np
import pytest

from tests.harness.spark_frames import columns
from tests.harness.support import seed

torch = pytest.importorskip("torch")

pytest_plugins = ["tests.harness.spark_cluster"]

pytestmark = pytest.mark.timeout(400)

ROWS = 64


@pytest.fixture(scope="module")
def numbers():
    return np.random.default_rng(seed())


@pytest.fixture(scope="module")
def frame(local_spark, numbers):
    """Rows for training (64) and for validation (16), in partitions of which one is empty."""
    from pyspark.ml.linalg import SparseVector, Vectors

    def row(number):
        x = [float(value) for value in numbers.normal(size=3)]
        y = 2 * x[0] - x[1] + 0.5
        vector = Vectors.dense(x) if number % 2 else SparseVector(3, [0, 2], [x[0], x[2]])
        kind = number % 4
        wrong = number % 8 == 0
        return (
            number,
            x,
            [[x[0], x[1]], [x[2], 1.0]],
            vector,
            kind,
            y,
            float(not wrong),
            number >= ROWS,
        )

    schema = "id long, x array<double>, m array<array<double>>, v vector, kind int, y double, w double, fold boolean"
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import StructType

    # Not StructType.fromDDL, which Spark 3.5 does not have.
    fields = local_spark.createDataFrame([], schema.replace("v vector, ", "")).schema
    fields = StructType([*fields[:3], StructType().add("v", VectorUDT())[0], *fields[3:]])
    rows = local_spark.sparkContext.parallelize([row(n) for n in range(ROWS + 16)], 3)
    empty = local_spark.sparkContext.parallelize([], 1)
    return local_spark.createDataFrame(rows.union(empty), fields).persist()


@pytest.fixture
def store(tmp_path, local_spark):
    from horoplug.spark.common.store import Store

    return Store.create(str(tmp_path / "store"))


def regression(key=7):
    torch.manual_seed(key)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def estimator(store, model, **options):
    from horoplug.spark.torch import TorchEstimator

    options = {
        "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "num_proc": 2,
        "verbose": 0,
        **options,
    }
    return TorchEstimator(model=model, store=store, **options)


def by_hand(model, x, y, epochs):
    """Train with all rows in one batch. Returns the loss before each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.short
def test_two_ranks_train_like_one_process_and_resume(frame, store, tmp_path):
    x, y = columns(frame, "x", "y")
    x, y = torch.tensor(x).float(), torch.tensor(y).float()[:, None]
    plain = regression()
    losses = by_hand(plain, x[:ROWS], y[:ROWS], 4)

    user = regression()
    before = parameters(user)
    mine = estimator(store, user, batch_size=1000, epochs=2, validation="fold")
    first = mine.fit(frame)
    assert parameters(user).equal(before)  # the estimator's own model does not change
    assert [entry["epoch"] for entry in first.getHistory()] == [0, 1]
    path = store.get_checkpoint_path(first.getRunId()) + ".pt"
    saved = torch.load(io.BytesIO(store.read(path)), weights_only=True)
    assert saved["history"] == first.getHistory()

    # Resumes with the state of the optimizer and trains two more epochs, with parameters for this training only.
    model = mine.fit(frame, {mine.run_id: first.getRunId(), mine.epochs: 4})
    assert mine.getEpochs() == 2
    torch.testing.assert_close(
        parameters(model.getModel()), parameters(plain), rtol=1e-4, atol=1e-6
    )
    history = model.getHistory()
    assert history[:2] == first.getHistory()
    assert [entry["train"]["loss"] for entry in history] == pytest.approx(losses, rel=1e-4)
    expected = torch.nn.functional.mse_loss(plain(x[ROWS:]), y[ROWS:]).item()
    assert history[-1]["validation"]["loss"] == pytest.approx(expected, rel=1e-4)
    assert not store.exists(store.get_train_data_path())
    left = [path.name for path in (tmp_path / "store").iterdir()]
    assert left == ["runs"], "intermediate data is left"

    # transform gives the model's own outputs, and saving changes nothing.
    with torch.no_grad():
        own = model.getModel()(x).numpy()[:, 0]
    model.write().overwrite().save(str(tmp_path / "saved"))
    from pyspark.ml import PipelineModel

    from horoplug.spark.torch import TorchModel

    loaded = TorchModel.load(str(tmp_path / "saved"))
    assert loaded.getHistory() == history
    assert loaded.uid == model.uid
    PipelineModel(stages=[model]).save(str(tmp_path / "pipeline"))
    (stage,) = PipelineModel.load(str(tmp_path / "pipeline")).stages
    for each in (loaded, stage):
        assert parameters(each.getModel()).equal(parameters(model.getModel()))
    output = stage.transform(frame)
    assert output.columns == [*frame.columns, "y__output"]
    assert dict(output.dtypes)["y__output"] == "float"
    (predicted,) = columns(output, "y__output")
    np.testing.assert_allclose(predicted, own, rtol=1e-5, atol=1e-6)
    replaced = model.copy({model.output_cols: ["id"]}).transform(frame.limit(0))
    assert replaced.columns == [*[name for name in frame.columns if name != "id"], "id"]
    assert replaced.count() == 0


class TwoInputs(torch.nn.Module):
    """Its second output depends on the kind alone: it is right also for rows that were not trained on."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 4)
        self.body = torch.nn.Linear(8, 8)
        self.value = torch.nn.Linear(8, 1)
        self.kind = torch.nn.Linear(4, 4)

    def forward(self, matrix, kind):
        assert matrix.shape[1:] == (2, 2)
        assert kind.dtype == torch.int64
        embedded = self.embedding(kind)
        both = torch.cat([matrix.flatten(1), embedded], 1)
        hidden = torch.relu(self.body(both))
        return self.value(hidden), self.kind(embedded)


class Recorder:
    """A callback that writes what it is called with on each rank."""

    def __init__(self, folder):
        self.folder = folder
        self.calls = []

    def on_train_begin(self, logs):
        self.calls.append("begin")

    def on_epoch_end(self, epoch, logs):
        self.calls.append([epoch, sorted(logs)])

    def on_train_end(self, logs):
        import horoplug.torch as hvd

        (self.folder / f"{hvd.rank()}.json").write_text(json.dumps(self.calls))


def test_several_inputs_and_outputs_with_all_options(frame, store, tmp_path, capfd):
    """Rows with weight 0 have wrong labels: the others are learned."""
    from pyspark.sql import functions as F

    import horoplug.torch as hvd

    wrong = frame.withColumn("y", F.when(F.col("w") == 0, 1e3).otherwise(F.col("y")))
    torch.manual_seed(3)
    model = TwoInputs()

    def accuracy(output, label):
        return (output.argmax(1) == label).float().mean() if output.ndim == 2 else 0

    def halved(rows):
        rows["y"] /= 2
        return rows

    mine = estimator(
        store,
        model,
        optimizer=torch.optim.Adam(model.parameters(), 0.05),
        feature_cols=["m", "kind"],
        input_shapes=[[-1, 2, 2], [-1]],
        label_cols=["y", "kind"],
        loss=[torch.nn.MSELoss(), torch.nn.functional.cross_entropy],
        loss_weights=[1.0, 0.5],
        metrics=[[], [accuracy]],
        sample_weight_col="w",
        validation=0.2,
        batch_size=8,
        val_batch_size=5,
        epochs=20,
        train_steps_per_epoch=12,
        validation_steps_per_epoch=2,
        backward_passes_per_step=2,
        gradient_compression=hvd.Compression.fp16,
        transformation_fn=halved,
        inmemory_cache_all=True,
        shuffle_buffer_size=16,
        random_seed=5,
        callbacks=[Recorder(tmp_path)],
        run_id="named",
        verbose=2,
    )
    trained = mine.fit(wrong)
    last = trained.getHistory()[-1]
    assert len(trained.getHistory()) == 20
    assert set(last["train"]) == {"loss", "kind_accuracy"} == set(last["validation"])
    assert last["train"]["loss"] < 0.3
    assert last["train"]["kind_accuracy"] == 1
    assert last["validation"]["kind_accuracy"] == 1
    for rank in (0, 1):
        calls = json.loads((tmp_path / f"{rank}.json").read_text())
        names = sorted(["loss", "kind_accuracy", "val_loss", "val_kind_accuracy"])
        assert calls == ["begin", *([epoch, names] for epoch in range(20))]
    shown = "".join(capfd.readouterr())
    assert "epoch 20/20: loss" in shown
    assert shown.count("epoch 3/20: 100%") == 1  # the progress bar of rank 0
    output = trained.transform(frame)
    predicted, kinds, y, w, kind = columns(output, "y__output", "kind__output", "y", "w", "kind")
    assert dict(output.dtypes)["kind__output"] == "vector"
    assert (kinds.argmax(1) == kind).all()
    assert np.abs(2 * predicted - y)[w == 1].mean() < 0.7


def test_training_on_parquet_of_another_program(frame, store, capfd):
    """Vectors become arrays, and validation data is what is at its place in the store. Metrics that are arrays are
    averages over all rows; what cannot be averaged is said once."""
    from pyspark.ml.functions import vector_to_array

    rows = frame.select("kind", vector_to_array("v", "float32").alias("v"), "fold")
    rows.where("not fold").write.parquet(store.get_train_data_path(4))
    rows.where("fold").write.parquet(store.get_val_data_path(4))
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 4)
    mine = estimator(store, model, feature_cols=["v"], label_cols=["kind"], shuffle=False)
    mine.setLoss(torch.nn.functional.cross_entropy).setOptimizer(
        torch.optim.SGD(model.parameters(), 0.0)
    )

    def shares(output, label):
        return torch.nn.functional.one_hot(label, 4).double().mean(0)

    def hits(output, label):  # one value for each row, of which the last batch has fewer
        return output.argmax(1) == label

    def text(output, label):
        return "a text"

    mine.setMetrics([shares, hits, text]).setVerbose(1)
    trained = mine.fit_on_parquet({mine.batch_size: 7}, dataset_idx=4)
    (entry,) = trained.getHistory()
    v, kind = columns(frame, "v", "kind")
    shares = [np.eye(4)[kind[part]].mean(0) for part in (slice(ROWS), slice(ROWS, None))]
    np.testing.assert_allclose(entry["train"]["shares"], shares[0], atol=1e-12)
    np.testing.assert_allclose(entry["validation"]["shares"], shares[1], atol=1e-12)
    assert set(entry["train"]) == {"loss", "shares"} == set(entry["validation"])
    shown = "".join(capfd.readouterr())
    for name, why in (("text", "a str on rank 0"), ("hits", r"of shape \(\d,\) in one batch and")):
        assert (
            len(re.findall(rf"the metric '{name}' cannot be averaged, because it is {why}", shown))
            == 1
        )
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            model(torch.tensor(v).float()), torch.tensor(kind).long(), reduction="none"
        )
    assert entry["train"]["loss"] == pytest.approx(losses[:ROWS].mean().item(), rel=1e-4)
    assert entry["validation"]["loss"] == pytest.approx(losses[ROWS:].mean().item(), rel=1e-4)
    assert store.exists(store.get_train_data_path(4))
    (output,) = columns(trained.transform(frame), "kind__output")
    with torch.no_grad():
        np.testing.assert_allclose(
            output, model(torch.tensor(v).float()).numpy(), rtol=1e-5, atol=1e-6
        )


def test_saved_estimator_keeps_its_parameters(store, tmp_path):
    from horoplug.spark.torch import TorchEstimator, TorchModel

    mine = estimator(
        store, regression(), epochs=3, validation="fold", callbacks=[Recorder(tmp_path)]
    )
    mine.save(str(tmp_path / "estimator"))
    loaded = TorchEstimator.load(str(tmp_path / "estimator"))
    assert loaded.uid == mine.uid
    assert parameters(loaded.getModel()).equal(parameters(mine.getModel()))
    own = {id(p) for p in loaded.getModel().parameters()}
    assert {id(p) for p in loaded.getOptimizer().param_groups[0]["params"]} == own
    for name in ("epochs", "validation", "feature_cols", "batch_size", "loss"):
        assert loaded.getOrDefault(name) == mine.getOrDefault(name)
    assert loaded.getStore().prefix_path == store.prefix_path
    with pytest.raises(
        ValueError, match=r"has a horoplug.spark.torch.estimator.TorchEstimator, not a"
    ):
        TorchModel.load(str(tmp_path / "estimator"))
    with pytest.raises(OSError, match=r"cannot save to .*overwrite"):
        mine.save(str(tmp_path / "estimator"))
    with pytest.raises(OSError, match=r"cannot load .*nowhere"):
        TorchModel.load(str(tmp_path / "nowhere"))


# ---- wrong input -----------------------------------------------------------------------------------------------------


def refused(function, text, kind=ValueError):
    with pytest.raises(kind, match=text) as caught:
        function()
    assert "\n" not in str(caught.value)


def test_wrong_parameters_are_one_line(store):
    from horoplug.spark.torch import TorchEstimator

    model = regression()
    for options, text in (
        ({"epochs": -1}, "epochs=-1: must be a whole number of at least 0"),
        ({"batch_size": 0}, "batch_size=0: must be"),
        ({"validation": 1.5}, "validation=1.5: must be a fraction"),
        ({"feature_cols": "x"}, "feature_cols='x': must be a list of names"),
        ({"shuffle": "yes"}, "shuffle='yes': must be True or False"),
        ({"transformation_fn": 3}, "transformation_fn=3: must be a function"),
    ):
        refused(lambda options=options: estimator(store, model, **options), text)
    refused(lambda: TorchEstimator(nonsense=1), "no parameter 'nonsense'", TypeError)
    refused(lambda: TorchEstimator(1), "positional", TypeError)
    assert TorchEstimator().setEpochs(4).getEpochs() == 4
    assert TorchEstimator(train_reader_num_workers=3).getTrainReaderNumWorker() == 3
    assert TorchEstimator(epochs=4, shuffle=None).getShuffle() is True


def test_parameters_that_do_not_fit_are_one_line(frame, store):
    from horoplug.spark.common.backend import SparkBackend

    model, other = regression(), regression()
    adam = torch.optim.Adam(other.parameters())

    class Unpicklable(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    lock = threading.Lock()

    def loss(output, label):
        with lock:
            return output.sum()

    for options, text in (
        ({"model": None}, "TorchEstimator needs model"),
        ({"store": None}, "TorchEstimator needs store"),
        ({"store": "/tmp"}, "store='/tmp': must be made by Store.create"),
        ({"label_cols": []}, "TorchEstimator needs label_cols"),
        ({"loss": None}, "TorchEstimator needs loss"),
        ({"optimizer": None}, "TorchEstimator needs optimizer"),
        ({"optimizer": "adam"}, "optimizer='adam': must be a torch.optim.Optimizer"),
        ({"optimizer": adam}, "the optimizer has parameters that are not the model's"),
        ({"model": "net"}, "model='net': must be a torch.nn.Module"),
        ({"loss": [loss, loss]}, "loss has 2 items for 1 label_cols"),
        (
            {"loss": loss},
            "loss: function cannot be pickled and sent to the executors: the variable lock of ",
        ),
        (
            {"callbacks": [threading.Lock()]},
            r"callbacks: list cannot be pickled .*: callbacks\[0\], a _thread.lock",
        ),
        (
            {"loss": loss, "sample_weight_col": "w"},
            "needs a loss with an argument reduction='none', which loss",
        ),
        ({"backend": 3}, "backend=3: must be a Backend"),
        ({"backend": SparkBackend(3)}, "give num_proc or a backend"),
        ({"data_module": object}, "data_module is not supported"),
    ):
        mine = estimator(store, model).setParams(**options)
        refused(lambda mine=mine: mine.fit(frame), text)
    own = Unpicklable()
    own.layer = torch.nn.Linear(3, 1)
    mine = estimator(store, own)
    refused(
        lambda: mine.fit(frame),
        r"model: Unpicklable cannot be pickled .*: model\.lock, a _thread.lock",
    )


def test_unusable_data_is_one_line(frame, store):
    from pyspark.sql import functions as F

    for options, changed, text in (
        ({"feature_cols": ["z"]}, frame, "no column 'z'; it has: id, x, m, v, kind, y, w, fold"),
        ({"label_cols": ["z"]}, frame, "the DataFrame has no column 'z'"),
        ({"sample_weight_col": "z"}, frame, "the DataFrame has no column 'z'"),
        ({"validation": "z"}, frame, "the DataFrame has no column 'z'"),
        ({"validation": "x"}, frame, "validation='x': the column must be a boolean"),
        ({}, frame.where("id < 0"), "the DataFrame has no rows"),
        (
            {"validation": "fold"},
            frame.where("fold"),
            "validation='fold' leaves no rows for training",
        ),
        (
            {"validation": "fold"},
            frame.where("not fold"),
            "leaves no rows for validation of 64 rows",
        ),
        ({}, frame.withColumn("y", F.expr("if(id < 3, null, y)")), "'y' has nulls in 3 of 80 rows"),
        ({}, frame.withColumn("x", F.expr("if(id < 2, null, x)")), "'x' has nulls in 2 of 80 rows"),
        (
            {},
            frame.withColumn("x", F.expr("if(id < 2, array(1d, null), x)")),
            "'x' has nulls in 2 of",
        ),
        (
            {},
            frame.withColumn("x", F.expr("if(id < 2, slice(x, 1, 2), x)")),
            "'x' has arrays of 2 to 3",
        ),
        ({}, frame.withColumn("x", F.expr("slice(x, 1, 0)")), "'x' has arrays without elements"),
        ({}, frame.withColumn("x", F.lit("a")), "column 'x' has the type string: convert it"),
        ({"input_shapes": [[-1, 2]]}, frame, "column 'x' has 3 elements per row, which do not fit"),
        ({"label_shapes": [[-1, 2]]}, frame, "label_shapes: column 'y' has 1 elements"),
    ):
        mine = estimator(store, regression(), **options)
        refused(lambda mine=mine, changed=changed: mine.fit(changed), text)


def test_unusable_stores_are_one_line(frame, tmp_path):
    from horoplug.spark.common.store import Store

    (tmp_path / "file").write_text("")
    for prefix, text in (
        (f"{tmp_path}/file/store", "the store cannot write file://"),
        (
            "memory://x",
            "Spark cannot write to the store memory://x, since only one process sees it",
        ),
    ):
        mine = estimator(Store.create(prefix), regression())
        refused(lambda mine=mine: mine.fit(frame), text, OSError)


def test_unusable_models_are_one_line(frame):
    from horoplug.spark.torch import TorchModel

    model = TorchModel(model=torch.nn.Linear(3, 2), feature_columns=["x"], label_columns=["y"])
    output = model.transform(frame)  # its outputs are found by computing one row
    assert dict(output.dtypes)["y__output"] == "vector"
    refused(lambda: TorchModel(feature_columns=["x"]).transform(frame), "TorchModel needs model")
    refused(lambda: model.copy().setLabelColumns(None).transform(frame), "needs label_columns")
    refused(lambda: model.copy({model.feature_columns: ["z"]}).transform(frame), "no column 'z'")
    refused(
        lambda: model.copy({model.output_cols: ["a", "b"]}).transform(frame), "has 1 outputs, and"
    )
    from pyspark.sql import functions as F

    bad = model.transform(frame.withColumn("x", F.expr("if(id < 2, null, x)")).repartition(1))
    with pytest.raises(Exception, match="column 'x' has nulls in 2 of 80 rows"):
        bad.collect()


@pytest.mark.short(failure=True)
def test_failing_loss_names_the_rank(frame, store):
    from horoplug.spark import RankError

    def loss(output, label):
        raise RuntimeError("the loss has failed")

    with pytest.raises(RankError, match="the loss has failed"):
        estimator(store, regression(), loss=loss).fit(frame)
