"""Ranks of horoplug.spark beside Spark's TorchDistributor on gloo: the start, and training steps.

    PYTHONPATH=build/clusters python benchmarks/spark_train.py --workers 2

horoplug    horoplug.spark.run; hvd.init() and hvd.DistributedOptimizer
gloo        TorchDistributor (local_mode=False) with init_process_group("gloo"); DistributedDataParallel
horovodrun  the function of horoplug without Spark: start only

All take turns for ``--rounds`` rounds on one session with a slot for each rank, and each row has the median. ``start``
is the time from the call of the driver until rank 0 has joined the others; ``rate`` are steps per second on rank 0,
after ``--warmup`` steps.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.job import options_of
from harness.record import Record
from ray_train import COLUMNS, launch, measure, on_gloo, on_horoplug, parse

ABOUT = """Spark: the start of ranks in a barrier job, until they have joined each other, and the steps of a multilayer
perceptron, by horoplug.spark.run and by TorchDistributor on gloo; medians of alternating rounds in one session."""


def on_process_group(config: dict[str, Any]) -> dict[str, float]:
    """Runs on each rank of TorchDistributor."""
    import torch

    torch.distributed.init_process_group("gloo")
    return on_gloo(config)


def make_session(workers: int) -> Any:
    """A session of Spark on this machine, whose workers find this file."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    warnings.simplefilter("ignore", FutureWarning)
    from pyspark.sql import SparkSession

    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    builder = SparkSession.builder.master(f"local[{workers}]").config("spark.log.level", "ERROR")
    for name, value in quiet.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def run(workers: int, config: dict[str, Any]) -> dict[str, float]:
    import horoplug.spark

    found: dict[str, float] = horoplug.spark.run(on_horoplug, [config], num_proc=workers)[0]
    return found


def distribute(workers: int, config: dict[str, Any]) -> dict[str, float]:
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=workers, local_mode=False, use_gpu=False)
    return dict(distributor.run(on_process_group, config))


def main() -> int:
    args = parse(__doc__)
    record = Record("spark_train", "Spark", ABOUT, COLUMNS, [], ranks=1, options=options_of(args))
    config = {"steps": args.steps, "warmup": args.warmup, "width": args.width}
    session = make_session(args.workers)
    kinds: dict[str, Callable[[int, dict[str, Any]], dict[str, float]]] = {
        "horoplug": run,
        "gloo": distribute,
        "horovodrun": launch,
    }
    for warm_up in (run, distribute):  # Spark's first job of each kind also loads classes
        warm_up(args.workers, config | {"steps": 1, "warmup": 1})
    turns = {kind: functools.partial(call, args.workers, config) for kind, call in kinds.items()}
    measure(record, turns, args.rounds)
    session.stop()
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
