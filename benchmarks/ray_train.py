"""A trainer of Ray Train on horoplug beside Ray's TorchTrainer on gloo: the start, and training steps.

    PYTHONPATH=build/clusters python benchmarks/ray_train.py --workers 2

horoplug    HoroplugTrainer; hvd.init() and hvd.DistributedOptimizer
gloo        TorchTrainer with TorchConfig(backend="gloo"); DistributedDataParallel
executor    RayExecutor with the function of horoplug (only the start differs from horoplug)
horovodrun  the same function without Ray: start only

All take turns for ``--rounds`` rounds on one cluster, and each row has the median. ``start`` is the time from the call
of the driver until rank 0 has joined the others; ``rate`` are steps per second on rank 0, after ``--warmup`` steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.job import command_line, options_of
from harness.record import Column, Record

ABOUT = """Ray Train: the start of a trainer, until its ranks have joined each other, and the steps of a multilayer
perceptron, on horoplug and on gloo; medians of alternating rounds on one cluster."""

COLUMNS = {
    "what": Column("what", width=11),
    "start": Column("start", "s", ".2f", 8),
    "rate": Column("rate", "steps/s", ".1f", 9),
    "ratio": Column("ratio", "gloo", ".2f", 7),
}


def make_model(width: int) -> tuple[Any, Any, Any]:
    """A model, and a batch with its targets."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(4)]
    return torch.nn.Sequential(*layers), torch.randn(16, width), torch.randn(16, width)


def steps(model: Any, optimizer: Any, inputs: Any, targets: Any, config: dict[str, Any]) -> float:
    """Train; returns steps per second."""
    import torch

    for step in range(config["warmup"] + config["steps"]):
        if step == config["warmup"]:
            began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return float(config["steps"] / (time.perf_counter() - began))


def on_horoplug(config: dict[str, Any]) -> dict[str, float]:
    import torch

    import horoplug.torch as hvd

    hvd.init()
    hvd.barrier()
    joined = time.time()
    model, inputs, targets = make_model(config["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    rate = steps(model, optimizer, inputs, targets, config)
    return {"joined": joined, "rate": rate}


def on_gloo(config: dict[str, Any]) -> dict[str, float]:
    import torch

    torch.distributed.barrier()
    joined = time.time()
    model, inputs, targets = make_model(config["width"])
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {"joined": joined, "rate": steps(model, optimizer, inputs, targets, config)}


def fit(kind: str, workers: int, folder: str, config: dict[str, Any]) -> dict[str, float]:
    """Run a trainer of Ray Train."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    from horoplug.ray.train import HoroplugTrainer

    function = on_horoplug if kind == "horoplug" else on_gloo
    result = Path(folder) / f"{kind}.json"

    def loop(config: dict[str, Any]) -> None:
        found = function(config)
        if ray.train.get_context().get_world_rank() == 0:
            result.write_text(json.dumps(found))

    arguments: dict[str, Any] = {
        "train_loop_config": config,
        "scaling_config": ray.train.ScalingConfig(num_workers=workers),
        "run_config": ray.train.RunConfig(storage_path=folder),
    }
    if kind == "horoplug":
        HoroplugTrainer(loop, **arguments).fit()
    else:
        TorchTrainer(loop, torch_config=TorchConfig(backend="gloo"), **arguments).fit()
    return dict(json.loads(result.read_text()))


def execute(workers: int, config: dict[str, Any]) -> dict[str, float]:
    """Run the function of horoplug by an executor."""
    from horoplug.ray import RayExecutor

    with RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=workers) as executor:
        executor.start()
        found: dict[str, float] = executor.run(on_horoplug, [config])[0]
        return found


def launch(workers: int, _: dict[str, Any]) -> dict[str, float]:
    """Start ranks by horovodrun that only join each other."""
    code = (
        "import time, horoplug.torch as hvd; hvd.init(); hvd.barrier(); "
        "print('joined', time.time()) if hvd.rank() == 0 else None"
    )
    command = [sys.executable, "-m", "horoplug.runner", "-np", str(workers), sys.executable, "-c"]
    done = subprocess.run([*command, code], capture_output=True, text=True, check=True, timeout=300)
    return {"joined": float(done.stdout.split("joined")[1])}


def parse(description: str | None) -> argparse.Namespace:
    """The options of this benchmark, and of that on Spark."""
    parser = command_line(description)
    parser.add_argument("--workers", type=int, default=2, help="number of ranks [2]")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind [3]")
    parser.add_argument("--steps", type=int, default=200, help="that are measured [200]")
    parser.add_argument("--warmup", type=int, default=20, help="steps before them [20]")
    parser.add_argument("--width", type=int, default=1024, help="of the model's layers [1024]")
    return parser.parse_args()


def measure(
    record: Record, kinds: Mapping[str, Callable[[], dict[str, float]]], rounds: int
) -> None:
    """Run all kinds in turns, and record the median of each. A kind returns when its rank 0 has joined the others
    (``joined``, seconds since the epoch) and, unless it measures the start only, the steps per second (``rate``)."""
    starts: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        for kind, call in kinds.items():
            began = time.time()
            found = call()
            starts.setdefault(kind, []).append(found["joined"] - began)
            if "rate" in found:
                rates.setdefault(kind, []).append(found["rate"])
    for kind in starts:
        row: dict[str, Any] = {"what": kind, "start": statistics.median(starts[kind])}
        if kind in rates:
            row["rate"] = statistics.median(rates[kind])
            row["ratio"] = row["rate"] / statistics.median(rates["gloo"])
        record.row(**row)


def main() -> int:
    args = parse(__doc__)
    import ray

    record = Record("ray_train", "Ray Train", ABOUT, COLUMNS, [], ranks=1, options=options_of(args))
    config = {"steps": args.steps, "warmup": args.warmup, "width": args.width}
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=args.workers + 1,
        runtime_env={"env_vars": {"PYTHONPATH": ":".join(filter(None, sys.path))}},
    )
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, Callable[[], dict[str, float]]] = {
            "horoplug": lambda: fit("horoplug", args.workers, folder, config),
            "gloo": lambda: fit("gloo", args.workers, folder, config),
            "executor": lambda: execute(args.workers, config),
            "horovodrun": lambda: launch(args.workers, config),
        }
        measure(record, kinds, args.rounds)
    ray.shutdown()
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
