"""Lightning's TorchEstimator on a real session: training on two ranks, resuming, transform, saving, and wrong input."""

import sys

import numpy as np
import pytest
import torch

from tests.harness.spark_frames import columns
from tests.harness.support import seed

lightning = pytest.importorskip("lightning")

pytest_plugins = ["tests.harness.spark_cluster"]

# Lightning imports mpi4py to look for an MPI, and does not expect the exception of mpi4py 4 where none is installed.
sys.modules["mpi4py"] = None

ROWS, VALIDATION, RATE = 48, 12, 0.1


@pytest.fixture(scope="module")
def frame(local_spark):
    numbers = np.random.default_rng(seed())
    rows = []
    for number in range(ROWS + VALIDATION):
        x = [float(value) for value in numbers.normal(size=3)]
        rows.append((number, x, x[0] - x[1], number % 2, number >= ROWS))
    schema = "id long, x array<double>, y double, kind int, fold boolean"
    return local_spark.createDataFrame(rows, schema).repartition(3).persist()


@pytest.fixture
def store(tmp_path, local_spark):
    from horoplug.spark.common.store import Store

    return Store.create(str(tmp_path / "store"))


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        )

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        assert set(batch) == {"x", "y"}
        return torch.nn.functional.mse_loss(self(batch["x"]), batch["y"])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE / 2, momentum=0.9)


class Seen(lightning.pytorch.Callback):
    """Writes a file at the end of training on each rank."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, module):
        (self.folder / f"{trainer.global_rank}.txt").write_text(str(trainer.world_size))


def by_hand(x, y, epochs):
    """The losses of training with all rows in one batch, and the parameters."""
    model = Module()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, parameters(model)


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_two_ranks_train_like_one_process_and_resume(frame, store, tmp_path):
    """Learning rates are multiplied by the number of ranks."""
    from horoplug.spark.lightning import TorchEstimator, TorchModel

    x, y = (torch.tensor(value).float() for value in columns(frame, "x", "y"))
    losses, expected = by_hand(x[:ROWS], y[:ROWS, None], 4)
    estimator = TorchEstimator(
        model=Module(),
        store=store,
        feature_cols=["x"],
        label_cols=["y"],
        label_shapes=[[-1, 1]],
        validation="fold",
        batch_size=100,
        epochs=2,
        num_proc=2,
        verbose=0,
        callbacks=[Seen(tmp_path)],
        trainer_args={"gradient_clip_val": 1e6},
        terminate_on_nan=True,
    )
    first = estimator.fit(frame)
    assert store.exists(store.get_checkpoint_path(first.getRunId()) + ".ckpt")
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.txt").read_text() == "2"
    model = estimator.fit(frame, {estimator.epochs: 4, estimator.run_id: first.getRunId()})
    history = model.getHistory()
    assert history[:2] == first.getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1, 2, 3]
    assert [entry["loss"] for entry in history] == pytest.approx(losses, rel=1e-3)
    own = model.getModel()
    torch.testing.assert_close(parameters(own), expected, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        outputs = own(x)
    last = torch.nn.functional.mse_loss(outputs[ROWS:], y[ROWS:, None]).item()
    assert history[-1]["val_loss"] == pytest.approx(last, rel=1e-3)

    model.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model")).setOutputCols(["b"])
    (predicted,) = columns(loaded.transform(frame.coalesce(1)), "b")
    np.testing.assert_allclose(predicted, outputs[:, 0], rtol=1e-4, atol=1e-5)


def test_module_of_pytorch_lightning(frame, store):
    """The package pytorch_lightning has the same classes as lightning.pytorch, as other objects."""
    from horoplug.spark.lightning import TorchEstimator

    pl = pytest.importorskip("pytorch_lightning")
    body = {name: vars(Module)[name] for name in ("forward", "loss", "training_step")}

    class OfPytorchLightning(pl.LightningModule):
        locals().update(body)

        def __init__(self):
            super().__init__()
            self.net = Module().net

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), RATE / 2, momentum=0.9)

    x, y = (torch.tensor(value).float() for value in columns(frame, "x", "y"))
    _, expected = by_hand(x, y[:, None], 2)
    estimator = TorchEstimator(
        model=OfPytorchLightning(),
        store=store,
        feature_cols=["x"],
        label_cols=["y"],
        label_shapes=[[-1, 1]],
        batch_size=100,
        epochs=2,
        num_proc=2,
        verbose=0,
    )
    model = estimator.fit(frame).getModel()
    torch.testing.assert_close(parameters(model), expected, rtol=1e-3, atol=1e-5)


def test_plain_module_with_loss_optimizer_and_metrics(frame, store, capfd):
    from horoplug.spark.lightning import TorchEstimator

    def accuracy(output, label):
        return (output.argmax(1) == label).float().mean()

    def shares(output, label):
        return torch.nn.functional.one_hot(label, 2).double().mean(0)

    def text(output, label):
        return "a text"

    torch.manual_seed(2)
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), 0.02),
        loss=torch.nn.functional.cross_entropy,
        metrics=[accuracy, shares, text],
        store=store,
        feature_cols=["kind"],
        input_shapes=[[-1, 1]],
        label_cols=["kind"],
        transformation_fn=lambda rows: rows.assign(kind=rows["kind"].astype("int64")),
        batch_size=6,
        epochs=8,
        train_steps_per_epoch=10,
        backward_passes_per_step=2,
        num_proc=2,
        verbose=1,
    )
    with pytest.raises(ValueError, match="is not a LightningModule, and so needs loss"):
        estimator.copy().setLoss(None).fit(frame)
    with pytest.raises(ValueError, match="no column 'z'"):
        estimator.copy().setLabelCols(["z"]).fit(frame)
    estimator.setModel(Floats(net))
    trained = estimator.fit(frame)
    last = trained.getHistory()[-1]
    assert last["accuracy"] == 1
    assert len(last["shares"]) == 2
    assert sum(last["shares"]) == pytest.approx(1)
    assert "text" not in last
    assert last["loss"] < 0.3
    shown = "".join(capfd.readouterr())
    assert "epoch 8/8: " in shown
    assert shown.count("the metric 'text' cannot be averaged, because it is a str on rank 0") == 1
    output, kind = columns(trained.transform(frame), "kind__output", "kind")
    assert (output.argmax(1) == kind).all()


def test_rows_with_weight_0_are_not_learned(frame, store):
    """Their labels are wrong: the model learns those of the others, for both outputs."""
    from pyspark.sql import functions as F

    from horoplug.spark.lightning import TorchEstimator

    weighted = frame.withColumn("w", (F.col("id") % 3 != 0).cast("double"))
    wrong = weighted.withColumn("y", F.when(F.col("w") == 0, 1e3).otherwise(F.col("y")))
    torch.manual_seed(3)
    net = TwoOutputs()
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), 0.05),
        loss=torch.nn.MSELoss(),
        loss_weights=[1.0, 0.5],
        sample_weight_col="w",
        store=store,
        feature_cols=["x"],
        label_cols=["y", "y"],
        batch_size=8,
        epochs=20,
        num_proc=2,
        verbose=0,
    )
    trained = estimator.fit(wrong).setOutputCols(["a", "b"])
    *outputs, y = columns(trained.transform(frame), "a", "b", "y")
    for output in outputs:
        assert np.mean((output - y) ** 2) < 0.05


class TwoOutputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 2)

    def forward(self, x):
        outputs = self.net(x)
        return outputs[:, :1], outputs[:, 1:]


class Floats(torch.nn.Module):
    """Takes whole numbers."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, kind):
        return self.net(kind.float())
