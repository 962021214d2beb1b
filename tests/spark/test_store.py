"""Stores: paths, files and errors, in folders and in the memory: file system of fsspec."""

import pickle

import pytest

from horoplug.spark.common.errors import StoreError
from horoplug.spark.common.store import (
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    LocalStore,
    Store,
)
from tests.harness.spark_cluster import CLUSTERS


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    monkeypatch.syspath_prepend(CLUSTERS)


@pytest.fixture(params=["plain", "file:", "file://", "memory://", "memory:"])
def store(request, tmp_path):
    prefix = f"{tmp_path}/store" if request.param == "plain" else f"{request.param}{tmp_path}/store"
    made = Store.create(prefix)
    yield made
    made.delete(made.prefix_path)


def test_prefix_decides_the_class():
    for prefix, kind in {
        "/data/x": LocalStore,
        "relative": LocalStore,
        "file:///data/x": LocalStore,
        "dbfs:/data/x": DBFSLocalStore,
        "/dbfs/data/x": DBFSLocalStore,
        "hdfs://namenode:8020/data": HDFSStore,
        "hdfs:///data": HDFSStore,
        "memory://x": FilesystemStore,
        "memory:x": FilesystemStore,
        "s3://bucket/x": FilesystemStore,
    }.items():
        assert type(Store.create(prefix)) is kind, prefix


def test_paths_of_a_store(store):
    prefix = store.prefix_path
    assert store.get_train_data_path() == f"{prefix}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{prefix}/intermediate_val_data.3"
    assert store.get_test_data_path("x") == f"{prefix}/intermediate_test_data.x"
    assert store.get_runs_path() == f"{prefix}/runs"
    assert store.get_run_path("run") == f"{prefix}/runs/run"
    assert store.get_checkpoint_path("run") == f"{prefix}/runs/run/checkpoint"
    assert store.get_logs_path("run") == f"{prefix}/runs/run/logs"
    assert store.get_full_path(prefix) == prefix
    assert store.saving_runs()
    ids = {store.new_run_id("torch") for _ in range(50)}
    assert len(ids) == 50
    assert all(each.startswith("torch_") for each in ids)


def test_parts_of_a_store_can_be_elsewhere(tmp_path):
    store = Store.create(tmp_path / "a", train_path="/b/train", runs_path="/c", save_runs=False)
    assert store.get_train_data_path(1) == "file:///b/train.1"
    assert store.get_val_data_path() == f"file://{tmp_path}/a/intermediate_val_data"
    assert store.get_runs_path() == "file:///c"
    assert not store.saving_runs()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b"])
def test_run_cannot_be_outside_of_the_store(tmp_path, name):
    with pytest.raises(ValueError, match="run_id"):
        Store.create(tmp_path).get_run_path(name)


def test_files_are_written_replaced_listed_and_deleted(store):
    path = store.get_checkpoint_path("run") + ".ckpt"
    assert not store.exists(path)
    assert store.get_checkpoints("run") == []
    store.delete(path)
    for content in (b"first", b"second and longer", b""):
        store.write(path, content)
        assert store.read(path) == content
    store.write_text(store.get_run_path("run") + "/other.txt", "ü")
    assert store.read(store.get_run_path("run") + "/other.txt") == "ü".encode()
    assert store.get_checkpoints("run") == [path]
    assert store.get_checkpoints("run", ".txt") == [store.get_run_path("run") + "/other.txt"]
    store.delete(path)
    assert not store.exists(path)
    store.delete(store.get_run_path("run"))
    assert not store.exists(store.get_run_path("run"))


def test_probe_leaves_nothing(store):
    store.check_writable()
    assert store.get_checkpoints(".x", "") == []
    fs = store.filesystem()
    from pyarrow.fs import FileSelector

    assert fs.get_file_info(FileSelector(store.get_localized_path(store.get_runs_path()))) == []


def test_pickled_store_reads_the_same_files(store):
    path = store.get_run_path("run") + "/x"
    store.write(path, b"1")
    copied = pickle.loads(pickle.dumps(store))
    assert copied.read(path) == b"1"
    assert store.visible_to_executors() == (not store.prefix_path.startswith("memory"))


def test_unwritable_store_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store.create(tmp_path / "file" / "store")
    with pytest.raises(StoreError, match=r"cannot write file://.*choose a store") as caught:
        store.check_writable()
    assert "\n" not in str(caught.value)


def test_missing_file_is_one_line(store):
    with pytest.raises(StoreError, match=r"cannot read .*nothing") as caught:
        store.read(store.get_run_path("nothing"))
    assert "\n" not in str(caught.value)


def test_unknown_file_system_is_one_line():
    with pytest.raises(StoreError, match="nonsense://x cannot be opened") as caught:
        Store.create("nonsense://x").check_writable()
    assert "\n" not in str(caught.value)


def test_parquet_data_sets_are_recognised(store):
    import pyarrow as pa
    from pyarrow import parquet

    folder = store.get_train_data_path()
    assert not store.is_parquet_dataset(folder)
    store.write(f"{folder}/_SUCCESS", b"")
    assert not store.is_parquet_dataset(folder)
    parquet.write_table(
        pa.table({"x": [1, 2]}),
        store.get_localized_path(f"{folder}/part.parquet"),
        filesystem=store.filesystem(),
    )
    assert store.is_parquet_dataset(folder)
    assert store.get_parquet_dataset(folder).count_rows() == 2


def test_paths_of_databricks():
    for prefix in ("dbfs:/data/x", "/dbfs/data/x", "file:///dbfs/data/x", "dbfs:///data/x"):
        store = DBFSLocalStore(prefix)
        assert store.prefix_path == "file:///dbfs/data/x"
        assert store.get_spark_path(store.get_train_data_path()) == (
            "dbfs:/data/x/intermediate_train_data"
        )
        assert store.get_localized_path(store.get_runs_path()) == "/dbfs/data/x/runs"


def test_paths_of_hdfs_and_s3():
    store = Store.create("hdfs://node:8020/data", user="me")
    assert store.get_runs_path() == "hdfs://node:8020/data/runs"
    assert store.get_localized_path(store.get_runs_path()) == "/data/runs"
    assert Store.create("/data", save_runs=False).get_runs_path() == "file:///data/runs"
    assert HDFSStore("/data", host="h", port=1).get_runs_path() == "hdfs://h:1/data/runs"
    assert HDFSStore("hdfs:///data").get_runs_path() == "hdfs:///data/runs"
    with pytest.raises(ValueError, match="libhdfs"):
        HDFSStore("hdfs:///data", driver="libhdfs3")
    with pytest.raises(ValueError, match="not like hdfs"):
        HDFSStore("hdfs://a:b/c")
    assert Store.create("s3://b/x").get_spark_path("s3://b/x/y") == "s3a://b/x/y"
