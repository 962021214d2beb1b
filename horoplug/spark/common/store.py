"""Stores: where estimators keep intermediate data, checkpoints and logs.

    store = Store.create("/shared/horoplug")            # also file:, hdfs://, dbfs:/, s3://, memory: …

A store has a prefix with this layout, of which each folder can be put elsewhere:

    PREFIX/intermediate_train_data.IDX, PREFIX/intermediate_val_data.IDX
    PREFIX/runs/RUN_ID/checkpoint.…, PREFIX/runs/RUN_ID/logs

The driver and all executors must see the same files under the prefix."""

from __future__ import annotations

import os.path
import posixpath
import re
import secrets
import time
from typing import Any, ClassVar

from horoplug.spark.common.errors import StoreError, first_line, needed

_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+):(?!\\)")


def scheme_of(path: str) -> str:
    """The scheme of a URL in lower case; empty for a plain path."""
    found = _SCHEME.match(path)
    return found[1].lower() if found else ""


class Store:
    """A folder of a file system, with Horovod's names for the files in it. :meth:`create` finds the class for a prefix.

    prefix_path: the folder; it is created when something is written.
    train_path, val_path, test_path, runs_path: other places for the parts of the store.
    save_runs: whether checkpoints are written. Without them, a run cannot be resumed.
    storage_options: arguments for the file system, such as credentials."""

    schemes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.prefix_path = self.get_full_path(str(prefix_path))
        places = {"train": train_path, "val": val_path, "test": test_path}
        self._data = {
            name: self.get_full_path(path or self._join(f"intermediate_{name}_data"))
            for name, path in places.items()
        }
        self._runs = self.get_full_path(runs_path or self._join("runs"))
        self._save_runs = save_runs
        self._storage_options = dict(storage_options or {})
        self._filesystem: Any = None

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """The store for a prefix: :class:`LocalStore` for plain paths and ``file:``, :class:`HDFSStore` for ``hdfs:``,
        :class:`DBFSLocalStore` for ``dbfs:`` and /dbfs, :class:`FilesystemStore` for all others.

        Further arguments are those of the class. Creates no file."""
        path = str(prefix_path)
        if path.startswith("/dbfs/"):
            return DBFSLocalStore(path, *args, **kwargs)
        kinds: tuple[type[Store], ...] = (DBFSLocalStore, HDFSStore, LocalStore)
        kind = next((k for k in kinds if scheme_of(path) in k.schemes), FilesystemStore)
        return kind(path, *args, **kwargs)

    # ---- paths -------------------------------------------------------------------------------------------------------

    def _join(self, *parts: str) -> str:
        return posixpath.join(self.prefix_path, *parts)

    def get_full_path(self, path: str) -> str:
        """The path as a URL."""
        return path

    def get_localized_path(self, path: str) -> str:
        """The path as the file system of the store takes it."""
        return path

    def get_spark_path(self, path: str) -> str:
        """The path as Spark takes it. Spark calls S3 ``s3a``."""
        return re.sub("^s3:", "s3a:", self.get_full_path(path))

    def _data_path(self, part: str, idx: int | str | None) -> str:
        return self._data[part] if idx is None else f"{self._data[part]}.{idx}"

    def get_train_data_path(self, idx: int | str | None = None) -> str:
        """The folder of the training data set with this number or name."""
        return self._data_path("train", idx)

    def get_val_data_path(self, idx: int | str | None = None) -> str:
        """The folder of the validation data set with this number or name."""
        return self._data_path("val", idx)

    def get_test_data_path(self, idx: int | str | None = None) -> str:
        """The folder of the test data set with this number or name."""
        return self._data_path("test", idx)

    def saving_runs(self) -> bool:
        """Whether checkpoints are written."""
        return self._save_runs

    def get_runs_path(self) -> str:
        return self._runs

    def get_run_path(self, run_id: str) -> str:
        """The folder of a run. Raises ValueError for a name that would lead out of the store."""
        if not run_id or "/" in run_id or run_id in (".", ".."):
            raise ValueError(f"run_id={run_id!r}: a run is the name of a folder, without '/'")
        return posixpath.join(self._runs, run_id)

    def get_checkpoint_filename(self) -> str:
        """The name of checkpoints, to which an estimator appends its suffix."""
        return "checkpoint"

    def get_checkpoint_path(self, run_id: str) -> str:
        return posixpath.join(self.get_run_path(run_id), self.get_checkpoint_filename())

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """The files of a run whose names end in ``suffix``, in alphabetical order."""
        fs = needed("pyarrow.fs")
        folder = self.get_localized_path(self.get_run_path(run_id))
        infos = self.filesystem().get_file_info(fs.FileSelector(folder, allow_not_found=True))
        names = sorted(info.base_name for info in infos if info.base_name.endswith(suffix))
        return [posixpath.join(self.get_run_path(run_id), name) for name in names]

    def get_logs_subdir(self) -> str:
        return "logs"

    def get_logs_path(self, run_id: str) -> str:
        """The folder for a run's logs, such as TensorBoard's."""
        return posixpath.join(self.get_run_path(run_id), self.get_logs_subdir())

    def new_run_id(self, name: str = "run") -> str:
        """A name for a run that no other run has."""
        return f"{name}_{time.strftime('%Y%m%d_%H%M%S')}_{secrets.token_hex(4)}"

    # ---- files -------------------------------------------------------------------------------------------------------

    def _connect(self) -> Any:
        raise NotImplementedError

    def filesystem(self) -> Any:
        """The ``pyarrow.fs.FileSystem``, whose paths are those of :meth:`get_localized_path`. Raises StoreError."""
        if self._filesystem is None:
            try:
                self._filesystem = self._connect()
            except (OSError, ValueError) as error:
                raise StoreError(
                    f"the store {self.prefix_path} cannot be opened: {first_line(error)}"
                ) from error
        return self._filesystem

    def _info(self, path: str) -> Any:
        return self.filesystem().get_file_info(self.get_localized_path(path))

    def exists(self, path: str) -> bool:
        return bool(self._info(path).type != needed("pyarrow.fs").FileType.NotFound)

    def read(self, path: str) -> bytes:
        """The contents of a file. Raises StoreError."""
        try:
            with self.filesystem().open_input_stream(self.get_localized_path(path)) as stream:
                return bytes(stream.read())
        except OSError as error:
            raise StoreError(f"cannot read {path}: {first_line(error)}") from error

    def write(self, path: str, content: bytes) -> None:
        """Write or replace a file. A reader sees the old contents or the new ones. Raises StoreError."""
        place = self.get_localized_path(path)
        part = f"{place}.{secrets.token_hex(4)}.part"
        try:
            self.filesystem().create_dir(posixpath.dirname(place), recursive=True)
            with self.filesystem().open_output_stream(part) as stream:
                stream.write(content)
            self.filesystem().move(part, place)
        except OSError as error:
            raise StoreError(
                f"the store cannot write {path}: {first_line(error)}; choose a store that the driver and the executors "
                "may write"
            ) from error

    def write_text(self, path: str, text: str) -> None:
        self.write(path, text.encode())

    def delete(self, path: str) -> None:
        """Delete a file or folder, if it exists."""
        kinds = needed("pyarrow.fs").FileType
        kind, place = self._info(path).type, self.get_localized_path(path)
        if kind == kinds.Directory:
            self.filesystem().delete_dir(place)
        elif kind != kinds.NotFound:
            self.filesystem().delete_file(place)

    def check_writable(self) -> None:
        """Write and delete a small file. Raises StoreError with one line."""
        path = posixpath.join(self._runs, f".probe-{secrets.token_hex(4)}")
        self.write(path, b"")
        self.delete(path)

    def visible_to_executors(self) -> bool:
        """Whether other processes can see the files."""
        return True

    def is_parquet_dataset(self, path: str) -> bool:
        """Whether the folder contains Parquet files only, besides those whose names begin with ``_`` or ``.``."""
        try:
            self.get_parquet_dataset(path)
        except (OSError, ValueError):
            return False
        return True

    def get_parquet_dataset(self, path: str) -> Any:
        """The ``pyarrow.dataset.Dataset`` of a folder. Raises StoreError if there is none."""
        dataset = needed("pyarrow.dataset")
        try:
            found = dataset.dataset(
                self.get_localized_path(path), filesystem=self.filesystem(), format="parquet"
            )
        except FileNotFoundError as error:
            raise StoreError(
                f"there is no {path} on this host: use a store that the driver and all executors see"
            ) from error
        if not found.files:
            raise StoreError(f"{path} has no Parquet file")
        return found


class FilesystemStore(Store):
    """A store in any file system that fsspec knows: ``s3://``, ``gs://``, ``abfs://``, ``memory://`` …

    Spark itself needs its own connector for the file system, such as hadoop-aws."""

    def get_full_path(self, path: str) -> str:
        scheme = scheme_of(path)
        if not scheme:
            return f"file://{os.path.abspath(path)}"
        if scheme == "file":
            return "file://" + os.path.abspath(re.sub("^file:(//[^/]*)?", "", path))
        return path if "://" in path else path.replace(":", "://", 1)

    def get_localized_path(self, path: str) -> str:
        url = self.get_full_path(path)
        if url.startswith("file://"):
            return url[len("file://") :]
        return str(self._kind()._strip_protocol(url))

    def _kind(self) -> Any:
        """The class of fsspec. Raises StoreError for an unknown scheme or a missing package, which fsspec names."""
        try:
            return needed("fsspec").get_filesystem_class(scheme_of(self.prefix_path))
        except (ImportError, ValueError) as error:
            raise StoreError(
                f"the store {self.prefix_path} cannot be opened: {first_line(error)}"
            ) from error

    def _connect(self) -> Any:
        fs = needed("pyarrow.fs")
        if scheme_of(self.prefix_path) == "file":
            return fs.LocalFileSystem()
        found = self._kind()(**self._storage_options)
        return fs.PyFileSystem(fs.FSSpecHandler(found))

    def visible_to_executors(self) -> bool:
        return scheme_of(self.prefix_path) != "memory"


class LocalStore(FilesystemStore):
    """A store in a folder of the machine, or in one that all hosts mount, such as NFS."""

    schemes = ("", "file")


class DBFSLocalStore(FilesystemStore):
    """A store in the file system of Databricks: ``dbfs:/…`` for Spark, /dbfs/… for all others."""

    schemes = ("dbfs",)

    def get_full_path(self, path: str) -> str:
        """The path under /dbfs as a URL of ``file:``."""
        match = re.match(r"^(?:dbfs:/+|(?:file:(?://)?)?/dbfs/)(.*)$", path)
        return super().get_full_path(f"/dbfs/{match[1]}" if match else path)

    def get_spark_path(self, path: str) -> str:
        return self.get_full_path(path).replace("file:///dbfs/", "dbfs:/", 1)


class HDFSStore(Store):
    """A store in Hadoop's file system: ``hdfs://host:port/path``, or ``hdfs:///path`` with the host of the Hadoop
    configuration. Needs libhdfs and CLASSPATH (``hadoop classpath --glob``) on the driver and the executors.

    host, port, user, kerb_ticket, extra_conf: see ``pyarrow.fs.HadoopFileSystem``. driver: only ``libhdfs`` exists."""

    schemes = ("hdfs", "viewfs")

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        if driver != "libhdfs":
            raise ValueError(f"HDFSStore: driver={driver!r}: only 'libhdfs' is supported")
        parts = re.match(r"^(?:(\w+):(?://([^/:]*)(?::(\d+))?)?)?(/(?!/).*)?$", prefix_path)
        if parts is None:
            raise ValueError(f"HDFSStore: {prefix_path!r} is not like hdfs://host:port/path")
        self._scheme = parts[1] or "hdfs"
        self._host = host or parts[2] or ""
        self._port = port or int(parts[3] or 0)
        self._options = {"user": user, "kerb_ticket": kerb_ticket, "extra_conf": extra_conf}
        super().__init__(prefix_path, **options)

    def get_full_path(self, path: str) -> str:
        authority = self._host + (f":{self._port}" if self._port else "")
        return f"{self._scheme}://{authority}{self.get_localized_path(path)}"

    def get_localized_path(self, path: str) -> str:
        return re.sub(r"^\w+:(//[^/]*)?", "", path) or "/"

    def _connect(self) -> Any:
        host = f"{self._scheme}://{self._host}" if self._host else "default"
        return needed("pyarrow.fs").HadoopFileSystem(host, self._port, **self._options)
