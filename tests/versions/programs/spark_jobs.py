"""Jobs on Spark in this process: run, run_on_dataframe, the estimator, and a killed rank: spark_jobs.py jobs|killed"""

import os
import signal
import sys

import numpy as np
from pyspark.sql import SparkSession
from report import Report, error_of

import horoplug.spark

check = Report(0)
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.warehouse.dir": f"{os.getcwd()}/tables",
}
builder = SparkSession.builder.master("local[2]").appName("versions")
for name, value in SETTINGS.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()


def reduce(number):
    import horoplug as hvd

    hvd.init()
    total = hvd.allreduce(np.full(3, number + hvd.rank()), op=hvd.Sum)
    return hvd.rank(), hvd.size(), float(total[0])


def read(batches):
    import horoplug as hvd

    hvd.init()
    found = []
    for batch in batches:
        hvd.allreduce(np.ones(1), op=hvd.Sum, name="step")
        found += batch.to_pylist()
    return found


def die():
    import horoplug as hvd

    hvd.init()
    for _ in range(20):
        hvd.allreduce(np.ones(3), name="step")
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        hvd.allreduce(np.ones(3), name="step")


def run_jobs() -> None:
    with check("run"):
        assert horoplug.spark.run(reduce, (10,)) == [(0, 2, 21.0), (1, 2, 21.0)]
    with check("an exception of a rank"):
        error = error_of(horoplug.spark.RankError, horoplug.spark.run, lambda: {}[0])
        assert "KeyError" in str(error), error
    with check("run_on_dataframe"):
        rows = [(number, str(number), [number / 2]) for number in range(23)]
        frame = spark.createDataFrame(rows, "id long, text string, vector array<double>")
        found = horoplug.spark.run_on_dataframe(frame, read, batch_size=4)
        found = sorted((row for rows in found for row in rows), key=lambda row: row["id"])
        assert [(row["id"], row["text"], row["vector"]) for row in found] == rows


def fit() -> None:
    with check("TorchEstimator"):
        import torch

        from horoplug.spark.common.store import Store
        from horoplug.spark.torch import TorchEstimator

        numbers = np.random.default_rng(0).normal(size=(64, 2))
        rows = [(x.tolist(), float(2 * x[0] - x[1])) for x in numbers]
        frame = spark.createDataFrame(rows, "x array<double>, y double")
        model = torch.nn.Linear(2, 1)
        estimator = TorchEstimator(
            model=model,
            store=Store.create(f"{os.getcwd()}/store"),
            num_proc=2,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
            loss=torch.nn.functional.mse_loss,
            input_shapes=[[-1, 2]],
            feature_cols=["x"],
            label_cols=["y"],
            batch_size=8,
            epochs=20,
            verbose=0,
        )
        trained = estimator.fit(frame)
        weights = trained.getModel().weight.detach().numpy()
        np.testing.assert_allclose(weights, [[2, -1]], atol=0.1)
        assert trained.transform(frame).count() == 64


def kill_a_rank() -> None:
    with check("RankError names the killed rank"):
        error = error_of(horoplug.spark.RankError, horoplug.spark.run, die)
        assert error.rank == 1, error
        assert "rank 1 was killed by signal 9" in str(error), error
    with check("the session can be used again"):
        assert horoplug.spark.run(reduce, (10,)) == [(0, 2, 21.0), (1, 2, 21.0)]


if sys.argv[1] == "jobs":
    run_jobs()
    fit()
else:
    kill_a_rank()
spark.stop()
check.finish()
