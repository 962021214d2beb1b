"""Intermediate data as batches: shares of ranks, orders, buffers and errors. No Spark is needed."""

import threading

import numpy as np
import pytest

from horoplug.spark.common.columns import (
    Column,
    Metadata,
    check_shapes,
    read_metadata,
    write_metadata,
)
from horoplug.spark.common.errors import EstimatorError, StoreError
from horoplug.spark.common.reading import Reader, RowGroups, ahead, batched, shuffled
from horoplug.spark.common.store import Store
from tests.harness.limits import scaled
from tests.harness.spark_cluster import CLUSTERS
from tests.harness.support import seed

COLUMNS = [
    Column("id", "scalar", "int64"),
    Column("x", "array", "float32", 3),
    Column("flag", "scalar", "bool"),
]


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    monkeypatch.syspath_prepend(CLUSTERS)


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    made = Store.create(f"{request.param}://{tmp_path}/store")
    yield made
    made.delete(made.prefix_path)


def write(store, files, folder=None, **replaced):
    """Write rows 0, 1, … to files with the given numbers of rows per row group."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = folder or store.get_train_data_path()
    store.write(f"{folder}/_SUCCESS", b"")
    begin = 0
    for number, groups in enumerate(files):
        path = store.get_localized_path(f"{folder}/part-{number:03}.parquet")
        writer = None
        for rows in groups:
            ids = np.arange(begin, begin + rows)
            values = {
                "id": ids,
                "x": list((ids[:, None] + [0.0, 0.25, 0.5]).astype("float32")),
                "flag": ids % 2 == 0,
            }
            table = pa.table(
                {**values, **{n: v[begin : begin + rows] for n, v in replaced.items()}}
            )
            fs = store.filesystem()
            writer = writer or parquet.ParquetWriter(path, table.schema, filesystem=fs)
            writer.write_table(table)
            begin += rows
        writer.close()
    return RowGroups(store, folder, COLUMNS)


def ids(batches):
    return [int(row) for batch in batches for row in batch["id"]]


def random_files(random):
    return [
        [int(n) for n in random.integers(1, 30, size=random.integers(1, 5))]
        for _ in range(random.integers(1, 6))
    ]


def test_batches_have_the_values_of_the_columns(store):
    groups = write(store, [[5, 4], [3]])
    assert groups.rows == [5, 4, 3]
    first, *_, last = Reader(groups, 0, 1, 5, shuffle=False).one_pass()
    assert first["id"].tolist() == [0, 1, 2, 3, 4]
    assert first["x"].dtype == np.float32
    assert first["x"].tolist() == [[n, n + 0.25, n + 0.5] for n in range(5)]
    assert first["flag"].tolist() == [True, False, True, False, True]
    assert last["id"].tolist() == [10, 11]


def test_ranks_read_each_row_in_equal_numbers_of_batches(tmp_path):
    random = np.random.default_rng(seed())
    for case in range(10):
        groups = write(Store.create(tmp_path / str(case)), random_files(random))
        total = sum(groups.rows)
        size, batch = int(random.integers(1, 6)), int(random.integers(1, 20))
        for shuffle in (False, True):
            options = {"shuffle": shuffle, "seed": case, "buffer": 25, "workers": case % 3}
            readers = [Reader(groups, rank, size, batch, **options) for rank in range(size)]
            passes = [list(reader.one_pass(2)) for reader in readers]
            assert len({len(batches) for batches in passes}) == 1
            assert len(passes[0]) == readers[0].steps
            read = [row for batches in passes for row in ids(batches)]
            assert set(read) == set(range(total))
            assert len(read) == size * readers[0].rows < total + size  # the repeated ones
            exact = [Reader(groups, r, size, batch, even=False, **options) for r in range(size)]
            read = [row for reader in exact for row in ids(reader.one_pass(2))]
            assert sorted(read) == list(range(total))


def test_more_ranks_than_rows(store):
    groups = write(store, [[1], [1]])
    readers = [Reader(groups, rank, 5, 4) for rank in range(5)]
    assert all(len(ids(reader.one_pass())) == 1 for reader in readers)
    exact = [ids(Reader(groups, rank, 5, 4, even=False).one_pass()) for rank in range(5)]
    assert sorted(row for rows in exact for row in rows) == [0, 1]
    assert exact.count([]) == 3


def test_orders_depend_on_seed_and_pass_only(store):
    groups = write(store, [[20, 20], [20, 20]])

    def order(number, **options):
        return ids(Reader(groups, 0, 1, 7, **options).one_pass(number))

    plain = order(0, shuffle=False)
    assert plain == order(5, shuffle=False) == list(range(80))
    for cache in (False, True):
        one = order(0, seed=1, cache=cache)
        assert one == order(0, seed=1, cache=cache)
        assert (
            len({tuple(x) for x in (plain, one, order(1, seed=1, cache=cache), order(0, seed=2))})
            == 4
        )
        assert sorted(one) == plain
    # With a buffer of one row, rows stay together with those of their row group, and row groups change places.
    rough = np.array(order(0, seed=3, buffer=1)).reshape(4, 20)
    groups_read = rough // 20
    assert (groups_read == groups_read[:, :1]).all()
    assert sorted(groups_read[:, 0]) == [0, 1, 2, 3] != groups_read[:, 0].tolist()


def test_stream_goes_on_with_the_next_pass(store):
    groups = write(store, [[6, 5]])
    reader = Reader(groups, 0, 1, 4, seed=1)
    stream = reader.stream(1)
    taken = [next(stream) for _ in range(2 * reader.steps)]
    assert ids(taken) == [*ids(reader.one_pass(1)), *ids(reader.one_pass(2))]


def test_cached_reader_reads_once(store):
    groups = write(store, [[8, 8], [8]])
    reader = Reader(groups, 1, 2, 4, cache=True, seed=1)
    first = ids(reader.one_pass(0))
    store.delete(store.get_train_data_path())
    second = ids(reader.one_pass(1))
    assert sorted(first) == sorted(second) == list(range(12, 24))
    assert first != second


def test_shuffling_reaches_as_far_as_the_buffer():
    random = np.random.default_rng(seed())
    blocks = [{"id": np.arange(10 * n, 10 * n + 10)} for n in range(100)]
    mixed = ids(shuffled(blocks, 100, random))
    assert sorted(mixed) == list(range(1000))
    places = np.abs(np.array(mixed) - np.arange(1000))
    assert 20 < places.mean() < 150
    assert places.max() > 100, "a row never stays in the buffer"
    whole = ids(shuffled(blocks, 10**6, random))
    assert np.abs(np.array(whole) - np.arange(1000)).mean() > 200


def test_batches_of_any_blocks():
    random = np.random.default_rng(seed())
    for size in (1, 3, 10, 1000):
        ends = np.sort(random.choice(np.arange(1, 100), 9, replace=False))
        blocks = [{"id": part} for part in np.split(np.arange(100), ends)]
        batches = list(batched(blocks, size))
        assert [len(b["id"]) for b in batches[:-1]] == [size] * (len(batches) - 1)
        assert ids(batches) == list(range(100))


def test_threads_read_ahead_and_end():
    started = threading.Semaphore(0)

    def load(number):
        started.release()
        return {"id": np.array([number])}

    before = threading.active_count()
    reading = ahead(load, range(100), 3)
    assert ids([next(reading)]) == [0]
    for _ in range(4):  # the one in use and three more
        assert started.acquire(timeout=scaled(20))
    reading.close()
    assert threading.active_count() == before
    assert ids(ahead(load, range(5), 2)) == ids(ahead(load, range(5), 0)) == list(range(5))


def test_error_in_a_reading_thread_is_raised():
    def load(number):
        raise EstimatorError(f"bad {number}")

    with pytest.raises(EstimatorError, match="bad 0"):
        list(ahead(load, range(5), 2))


# ---- transformation_fn -----------------------------------------------------------------------------------------------


def transformed(store, function):
    write(store, [[4, 3]])
    groups = RowGroups(store, store.get_train_data_path(), COLUMNS, function)
    return next(Reader(groups, 0, 1, 100, shuffle=False).one_pass())


def test_transformation_changes_rows(store):
    def double(frame):
        frame["id"] *= 2
        frame["x"] = frame["x"].map(lambda x: np.append(x, 7).astype("float32"))
        return frame

    block = transformed(store, double)
    assert block["id"].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert block["x"].shape == (7, 4)
    assert block["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda frame: frame[:1], "pandas.DataFrame with the 4 rows"),
        (lambda frame: None, "pandas.DataFrame with the 4 rows"),
        (lambda frame: frame.drop(columns="x"), "removed the column 'x'"),
        (lambda frame: frame.assign(x=[None] * len(frame)), "'x' has nulls in 4 of 4"),
        (lambda frame: frame.assign(x=[[1] * n for n in range(len(frame))]), "column 'x': .*shape"),
    ],
)
def test_wrong_transformation_is_one_line(store, function, text):
    with pytest.raises(EstimatorError, match=text) as caught:
        transformed(store, function)
    assert "\n" not in str(caught.value)


# ---- bad data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replaced", "text"),
    [
        ({"id": [1, None, 3, None]}, "'id' has nulls in 2 of 4 rows"),
        ({"x": [[1.0, 2, 3], None, [1.0, 2, 3], [1.0, 2, 3]]}, "'x' has nulls in 1 of 4"),
        ({"x": [[1.0, 2, 3], [1.0, None, 3], [1.0, 2, 3], [0.0] * 3]}, "'x' has arrays with nulls"),
        ({"x": [[1.0, 2, 3], [1.0], [1.0, 2, 3], [0.0] * 3]}, "'x' has arrays of 1 to 3 elements"),
    ],
)
def test_bad_data_is_one_line(store, replaced, text):
    groups = write(store, [[4]], **replaced)
    with pytest.raises(EstimatorError, match=text) as caught:
        list(Reader(groups, 0, 1, 2).one_pass())
    assert "\n" not in str(caught.value)


def test_missing_data_is_one_line(store):
    with pytest.raises(StoreError, match=r"there is no .*intermediate_train_data") as caught:
        RowGroups(store, store.get_train_data_path(), COLUMNS)
    assert "\n" not in str(caught.value)


# ---- metadata --------------------------------------------------------------------------------------------------------


def test_metadata_of_foreign_parquet_is_found_in_its_files(store):
    write(store, [[4, 3], [2]])
    write(store, [[5]], store.get_val_data_path())
    metadata = read_metadata(store, None, ["x", "id", "flag"])
    assert metadata.columns == (COLUMNS[1], COLUMNS[0], COLUMNS[2])
    assert (metadata.train_rows, metadata.val_rows) == (9, 5)
    with pytest.raises(EstimatorError, match="no column 'z'; it has: id, x, flag"):
        read_metadata(store, None, ["z"])
    with pytest.raises(StoreError, match=r"intermediate_train_data\.7: write Parquet"):
        read_metadata(store, 7, ["x"])


def test_foreign_parquet_with_text_is_one_line(store):
    write(store, [[2]], id=["a", "b"])
    with pytest.raises(EstimatorError, match="column 'id' has the type string: convert") as caught:
        read_metadata(store, None, ["id"])
    assert "\n" not in str(caught.value)


def test_metadata_is_written_and_read(store):
    write(store, [[4]])
    written = Metadata(tuple(COLUMNS), 4, 2)
    write_metadata(store, store.get_train_data_path(), written)
    assert read_metadata(store, None, ["x"]) == written
    with pytest.raises(EstimatorError, match="no column 'z'; it has: id, x, flag"):
        read_metadata(store, None, ["z"])


@pytest.mark.parametrize(
    ("shape", "fits"),
    [([-1, 3], True), ([-1, 1, 3], True), ([-1, 1, -1], True), ([-1, 2, -1], False), ([-1, 4], False), ([-1], False)],
)  # fmt: skip
def test_shapes_are_checked(shape, fits):
    if fits:
        check_shapes([COLUMNS[1]], [shape], "input_shapes")
        return
    with pytest.raises(EstimatorError, match="input_shapes: column 'x' has 3 elements per row"):
        check_shapes([COLUMNS[1]], [shape], "input_shapes")


def test_number_of_shapes_is_checked():
    with pytest.raises(EstimatorError, match="input_shapes has 1 shapes for 3 columns"):
        check_shapes(COLUMNS, [[-1]], "input_shapes")
