"""Spark sessions that all tests of a file share, because starting one takes seconds.

    pytest_plugins = ["tests.harness.spark_cluster"]

    def test_sum(local_spark): ...

``local_spark`` has two slots in one process of Java (``local[2]``), ``spark_cluster`` two executors with one slot each
(``local-cluster[2,1,1024]``). A process can have one session at a time: a file uses one of the two."""

import contextlib
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT
from tests.harness.limits import scaled

CLUSTERS = ROOT / "build" / "clusters"  # requirements/clusters.txt
# Java's options for a short life: a simple collector, and no compiler that takes long. Without -Xlog:disable, Java
# prints to stdout why it does not use an archive of classes.
_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData -Xlog:disable"
_CONFIGURATION = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.default.parallelism": "2",
    "spark.locality.wait": "0",
    "spark.log.level": "ERROR",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def variables() -> dict[str, str]:
    """The environment variables of Spark's driver and, since executors inherit them, of its Python workers."""
    python_path = [str(ROOT), str(CLUSTERS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, python_path))),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONWARNINGS": "ignore::FutureWarning",  # pyspark 4.3 about pandas 3
        "SPARK_HOME": str(CLUSTERS / "pyspark"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@contextlib.contextmanager
def session(master: str, folder: Path, **configuration: str) -> Iterator[Any]:
    """A session of its own process of Java. ``folder``: for Spark's files; ``configuration``: further settings, whose
    names have ``_`` for ``.``."""
    archive = _archive()
    new = None if archive.exists() else folder / archive.name
    driver = (
        f"{_JAVA} -XX:ArchiveClassesAtExit={new}"
        if new
        else f"{_JAVA} -XX:SharedArchiveFile={archive}"
    )
    java = {
        "spark.driver.extraJavaOptions": driver,
        "spark.executor.extraJavaOptions": _JAVA if new else driver,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables().items():
            patch.setenv(name, value)
        patch.syspath_prepend(CLUSTERS)
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        assert SparkSession.getActiveSession() is None, "another session is active"
        builder = SparkSession.builder.master(master).appName("horoplug-tests")
        places = {"spark.local.dir": folder / "local", "spark.sql.warehouse.dir": folder / "tables"}
        named = {name.replace("_", "."): value for name, value in configuration.items()}
        for name, value in {**_CONFIGURATION, **java, **places, **named}.items():
            builder = builder.config(name, str(value))
        spark = builder.getOrCreate()
        application = spark.sparkContext.applicationId
        try:
            yield spark
            if new:
                _use_sql(spark, folder / "table")
        finally:
            spark.stop()
            _end_java(SparkContext)
            if new and new.exists():
                _publish(new, archive)
            # Executors of a local cluster have their working directories here.
            shutil.rmtree(CLUSTERS / "pyspark" / "work" / application, ignore_errors=True)
            SparkSession.builder._options.clear()


def _archive() -> Path:
    """The file with the loaded classes of Spark, which the first session writes. With it, a process of Java needs half
    the processor time. Java itself verifies that an archive fits the classes, and does without one that does not."""
    home = os.environ.get("JAVA_HOME")
    java = Path(f"{home}/bin/java" if home else shutil.which("java") or "java").resolve()
    changed = java.stat().st_mtime_ns if java.exists() else 0
    key = zlib.crc32(f"{java} {changed} {_JAVA}".encode())
    return CLUSTERS / f"spark-{key:08x}.jsa"


def _use_sql(spark: Any, table: Path) -> None:
    """Load the classes that sessions need, so that the archive has them whatever the first session did."""
    frame = spark.createDataFrame([(1, [1.0], True)] * 4, "id long, x array<double>, y boolean")
    frame.repartition(2).write.parquet(str(table))
    read = spark.read.parquet(str(table))
    read.mapInArrow(lambda batches: batches, read.schema).groupBy("y").count().collect()


def _publish(new: Path, archive: Path) -> None:
    """Move a complete archive to its place, where sessions of other processes may look for it."""
    near = archive.with_suffix(f".{os.getpid()}")
    shutil.move(new, near)
    near.replace(archive)


def _end_java(context: Any) -> None:
    """End the process of Java, which would otherwise serve the next session with this one's variables."""
    gateway = context._gateway
    context._gateway = context._jvm = None
    gateway.shutdown()
    gateway.proc.stdin.close()  # it ends at the end of its input
    gateway.proc.wait(scaled(300))  # it may write an archive


@pytest.fixture(scope="module")
def local_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session with two slots in one process of Java."""
    with session("local[2]", tmp_path_factory.mktemp("spark")) as spark:
        yield spark


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session with two executors, which have one slot each."""
    with session("local-cluster[2,1,1024]", tmp_path_factory.mktemp("spark")) as spark:
        yield spark


# ---- in ranks --------------------------------------------------------------------------------------------------------


def executor() -> int:
    """The process of the executor that runs this rank. Its parent is Spark's Python worker, the parent of that is the
    daemon that has forked it, and the parent of that is the executor."""
    pid = os.getppid()
    for _ in range(2):
        status = Path(f"/proc/{pid}/status").read_text()
        pid = next(int(line.split()[1]) for line in status.splitlines() if "PPid:" in line)
    return pid
