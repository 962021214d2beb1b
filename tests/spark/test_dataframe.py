"""Ranks of horoplug.spark read the rows of a DataFrame or RDD; TorchDistributor, whose job is one of Spark SQL, too."""

import contextlib
import time

import pytest

import horoplug.spark
from tests.harness.same_program import RANKS, as_script, assert_same_as_horovodrun
from tests.harness.support import imported_example
from tests.harness.train_example import write_fashion_mnist

pytest_plugins = ["tests.harness.spark_cluster"]


@pytest.fixture(scope="module", autouse=True)
def spark(local_spark):
    return local_spark


def rows_of(batches):
    """A rank's function: for each batch its rows, with one operation for each batch."""
    import numpy as np

    import horoplug as hvd

    hvd.init()
    found = []
    for batch in batches:
        hvd.allreduce(np.ones(1), op=hvd.Sum, name="step")
        found.append(batch.to_pylist())
    return found


def values(found, column="id"):
    return sorted(row[column] for batches in found for batch in batches for row in batch)


@pytest.mark.short
def test_each_row_reaches_one_rank_and_ranks_with_fewer_batches_wait_in_join(spark):
    def skewed(index, _):
        return iter([{"id": number} for number in range(11)] if index else [{"id": 11}])

    rdd = spark.sparkContext.parallelize([0, 1], 2).mapPartitionsWithIndex(skewed)
    frame = spark.createDataFrame(rdd, "id long")
    found = horoplug.spark.run_on_dataframe(frame, rows_of, batch_size=2, repartition=False)
    assert [[len(batch) for batch in batches] for batches in found] == [[1], [2] * 5 + [1]]
    assert values(found) == [*range(12)]
    for uneven, most in (("join", 12), ("equal", 3)):
        found = horoplug.spark.run_on_dataframe(
            rdd, rows_of, batch_size=2, repartition=False, uneven=uneven
        )
        sizes = [sum(map(len, batches)) for batches in found]
        assert sizes == ([1, 11] if most == 12 else [1, 2])


def test_rows_are_spread_evenly_and_keep_types_and_nulls(spark):
    schema = "id long, text string, vector array<double>"
    rows = [(n, None if n % 3 == 0 else str(n), [n / 2.0]) for n in range(40)]
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    found = horoplug.spark.run_on_dataframe(frame, rows_of)
    assert all(15 <= sum(map(len, batches)) <= 25 for batches in found)
    flat = [row for batches in found for batch in batches for row in batch]
    assert sorted((r["id"], r["text"], r["vector"]) for r in flat) == rows


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ([(1, "a"), (2, "b")], [{"_1": 1, "_2": "a"}, {"_1": 2, "_2": "b"}]),
        ([1.5, 2.5], [{"value": 1.5}, {"value": 2.5}]),
        ([{"x": 1}, {"x": None}], [{"x": 1}, {"x": None}]),
    ],
)
def test_elements_of_an_rdd_become_columns(spark, elements, expected):
    rdd = spark.sparkContext.parallelize(elements, 1)
    found = horoplug.spark.run_on_dataframe(rdd, rows_of, num_proc=1, repartition=False)
    assert found == [[expected]]


def test_a_partition_may_be_empty(spark):
    frame = spark.range(0, 2, numPartitions=2).where("id = 1")
    found = horoplug.spark.run_on_dataframe(frame, rows_of, repartition=False)
    assert found == [[], [[{"id": 1}]]]


def test_a_rank_may_end_before_its_rows(spark):
    def first(batches):
        return len(next(batches))

    frame = spark.range(400000)
    assert horoplug.spark.run_on_dataframe(frame, first, batch_size=7) == [7, 7]


def test_rows_come_while_they_are_computed(spark, tmp_path):
    def compute(numbers):
        for number in numbers:
            for _ in range(3000):
                if number == 0 or (tmp_path / "seen").exists():
                    break
                time.sleep(0.01)
            yield number

    def see(batches, folder):
        sizes = []
        for batch in batches:
            (folder / "seen").touch()
            sizes.append(batch.num_rows)
        return sizes

    # 10000 elements make a batch.
    rdd = spark.sparkContext.parallelize([0] * 10000 + [1], 1).mapPartitions(compute)
    arguments = {"num_proc": 1, "repartition": False}
    found = horoplug.spark.run_on_dataframe(rdd, see, (tmp_path,), **arguments)
    assert found == [[10000, 1]]


@pytest.mark.parametrize("repartition", [True, False])
@pytest.mark.short(failure=True)
def test_data_without_rows_has_one_line(spark, repartition):
    for frame in (spark.createDataFrame([], "id long"), spark.range(5).where("id > 10")):
        with pytest.raises(ValueError, match="the data has no rows"):
            horoplug.spark.run_on_dataframe(frame, rows_of, num_proc=2, repartition=repartition)


def test_a_partition_that_cannot_be_computed_ends_the_job(spark):
    def compute(numbers):
        for number in numbers:
            if number == 15000:
                raise ValueError("a bad row")
            yield number

    rdd = spark.sparkContext.parallelize(range(16000), 1).mapPartitions(compute)
    with pytest.raises(horoplug.spark.RankError) as caught:
        horoplug.spark.run_on_dataframe(rdd, rows_of, num_proc=1, repartition=False)
    assert str(caught.value).startswith("rank 0: its rows cannot be computed: a bad row")
    first = spark.sparkContext.parallelize([15000, 0], 2).mapPartitions(compute)
    text = "^partition 0: its rows cannot be computed: a bad row$"
    with pytest.raises(horoplug.spark.RankError, match=text):
        horoplug.spark.run_on_dataframe(first, rows_of, repartition=False)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"uneven": "drop"}, ValueError, "uneven='drop': one of join, equal"),
        ({"batch_size": 0}, ValueError, "batch_size=0: at least 1"),
        ({"num_proc": 3}, ValueError, "num_proc=3, but Spark runs only 2 tasks at once"),
        ({"num_proc": 1, "repartition": False}, ValueError, "2 partitions .* num_proc=1"),
    ],
)
def test_a_wrong_argument_has_one_line(spark, options, kind, text):
    with pytest.raises(kind, match=text) as caught:
        horoplug.spark.run_on_dataframe(spark.range(10).repartition(2), rows_of, **options)
    assert "\n" not in str(caught.value)


def test_other_data_has_one_line():
    with pytest.raises(TypeError, match="wants a DataFrame or an RDD, not list"):
        horoplug.spark.run_on_dataframe([1], rows_of)


def test_equal_numbers_of_batches_need_init_before_the_first_batch(spark):
    def read(batches):
        return list(batches)

    with contextlib.redirect_stderr(None), pytest.raises(RuntimeError, match=r"call hvd.init\(\)"):
        horoplug.spark.run_on_dataframe(spark.range(10), read, uneven="equal")


# ---- TorchDistributor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_mode", [True, False])
def test_torch_distributor_runs_a_program_unchanged(local_mode):
    from pyspark.ml.torch.distributor import TorchDistributor

    def train(factor):
        import torch

        import horoplug.torch as hvd

        hvd.init()
        total = hvd.allreduce(torch.ones(1) * factor * (hvd.rank() + 1), op=hvd.Sum)
        return hvd.size(), total.item()

    distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
    assert distributor.run(train, 2.0) == (2, 6.0)


# ---- the examples ----------------------------------------------------------------------------------------------------


def test_the_example_learns_from_a_dataframe(tmp_path):
    write_fashion_mnist(tmp_path)
    main = imported_example("spark/train_fashion.py").main
    first, second = main(["--data-dir", str(tmp_path), "--epochs", "4", "--batch-size", "16"])
    assert first == second
    assert first["accuracy"] > 0.6


def test_the_training_script_gives_the_parameters_of_horovodrun(tmp_path):
    def train(script, arguments):
        horoplug.spark.run(as_script, (script, arguments), num_proc=RANKS)

    assert_same_as_horovodrun(tmp_path, train)
