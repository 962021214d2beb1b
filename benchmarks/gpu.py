"""Measure the cost of horoplug on a GPU. The results are printed as a table and written to docs/gpu-results.md.

    make bench-gpu                      (or: python benchmarks/gpu.py)
    python benchmarks/gpu.py --dry      (prints only)

Needs only PyTorch with CUDA and one GPU, on which all parts run. The parts:

kernels   bandwidth of packing and unpacking all gradients of a model in one launch, as a share of the bandwidth of the
          GPU's own copies, and the CPU time of a launch (build/release/bin/gpu_move_bench)
enqueue   the host's time to submit an operation and wait until it is enqueued, on one rank
step      time of a step of ResNet-50 on one rank with DistributedOptimizer, relative to a step without it
reduce    time to reduce all gradients of a model by two ranks on this GPU, with each algorithm

Times are medians; compared variants alternate in one run. A part that fails prints the reason and leaves its rows
unchanged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from harness import gpu_results
from harness.models import gradients

ROOT: Final = Path(__file__).resolve().parent.parent
MOVE_BENCH: Final = ROOT / "build" / "release" / "bin" / "gpu_move_bench"
MODELS: Final = ("resnet50", "bert-large")
ALGORITHMS: Final = ("ipc", "staged", "nccl")
HOW: Final = "`make bench-gpu`"
_MARK: Final = "result of part: "

Results = dict[str, str]
"""The results as text, by row of the table."""


# ---- the table ------------------------------------------------------------------------------------------------------


def rows() -> list[str]:
    """The rows of the table, in order."""
    return [
        *(f"Packing {model}'s gradients, share of a copy's bandwidth" for model in MODELS),
        *(f"Unpacking {model}'s gradients, share of a copy's bandwidth" for model in MODELS),
        *(f"CPU time of the launch that packs {model}'s gradients" for model in MODELS),
        "Host's time for one allreduce in place, one rank",
        "Step of ResNet-50 with DistributedOptimizer over one without, one rank",
        *(
            f"Two ranks on one GPU, {model}, {algorithm}"
            for model in MODELS
            for algorithm in ALGORITHMS
        ),
    ]


# ---- parts ----------------------------------------------------------------------------------------------------------


def kernels() -> Results:
    from horoplug.common.gpu import files

    lists = "".join(
        f"{model} {' '.join(str(math.prod(shape)) for shape in gradients(model))}\n"
        for model in MODELS
    )
    done = subprocess.run(
        [str(MOVE_BENCH), *files()], input=lists, capture_output=True, text=True, timeout=600
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    found = {}
    for line in done.stdout.splitlines():
        model, *numbers = line.split()
        pack, unpack, copy, micros = map(float, numbers)
        rate = f"of {copy / 1e9:,.0f} GB/s"
        found[f"Packing {model}'s gradients, share of a copy's bandwidth"] = (
            f"{pack / copy:.0%} {rate}"
        )
        found[f"Unpacking {model}'s gradients, share of a copy's bandwidth"] = (
            f"{unpack / copy:.0%} {rate}"
        )
        found[f"CPU time of the launch that packs {model}'s gradients"] = f"{micros:.1f} µs"
    return found


def enqueue() -> Results:
    import torch

    import horoplug.torch as hvd

    hvd.init()
    tensor = torch.ones(1000, device="cuda")
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            hvd.allreduce_(tensor, op=hvd.Max, name="x")
        times.append((time.perf_counter() - start) / 100)
    return {
        "Host's time for one allreduce in place, one rank": f"{_median(times[2:]) * 1e6:.1f} µs"
    }


def step() -> Results:
    sys.path.insert(0, str(ROOT / "examples" / "pytorch"))
    os.environ["HOROVOD_ELASTIC"] = "1"  # hooks even where there is no other rank
    import synthetic_benchmark as networks  # type: ignore[import-not-found,unused-ignore]
    import torch

    import horoplug.torch as hvd

    hvd.init()
    torch.backends.cudnn.benchmark = True
    images = torch.randn(64, 3, 224, 224, device="cuda")
    labels = torch.randint(1000, (64,), device="cuda")

    def make(wrap: bool) -> Callable[[], None]:
        model = networks.resnet(*networks.MODELS["resnet50"]).cuda()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

        def run() -> None:
            for _ in range(5):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
            torch.cuda.synchronize()

        return run

    runs = [make(False), make(True)]
    times: list[list[float]] = [[], []]
    for turn in range(13):
        for run, own in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if turn >= 3:
                own.append((time.perf_counter() - start) / 5)
    without, with_it = map(_median, times)
    return {
        "Step of ResNet-50 with DistributedOptimizer over one without, one rank": (
            f"{with_it / without - 1:+.1%} of {without * 1e3:.1f} ms (64 images, float32)"
        )
    }


def reduce(algorithm: str) -> Results:
    """The part ``reduce`` of one algorithm; runs on each of two ranks."""
    import torch

    import horoplug.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    found = {}
    for model in MODELS:
        tensors = [torch.ones(shape, device="cuda") for shape in gradients(model)]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        times = []
        for _ in range(13):
            hvd.barrier()
            start = time.perf_counter()
            handles = [
                hvd.allreduce_async_(tensor, op=hvd.Average, name=f"{model}.{n}")
                for n, tensor in enumerate(tensors)
            ]
            for handle in handles:
                hvd.synchronize(handle)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        if not all(bool((tensor == 1).all()) for tensor in tensors):
            raise RuntimeError("wrong results")
        seconds = _median(times[3:])
        found[f"Two ranks on one GPU, {model}, {algorithm}"] = (
            f"{seconds * 1e3:.2f} ms, {nbytes / seconds / 1e9:.1f} GB/s"
        )
        del tensors
    return found


def _median(times: list[float]) -> float:
    return statistics.median(times)


# ---- running them ---------------------------------------------------------------------------------------------------

PARTS: Final[dict[str, Callable[..., Results]]] = {
    "kernels": kernels,
    "enqueue": enqueue,
    "step": step,
    "reduce": reduce,
}


def in_own_process(part: str, algorithm: str | None = None) -> Results:
    """Run a part in a new process and return its results. Raises RuntimeError with the last line that the process has
    written if it fails."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part]
    env = dict(os.environ)
    if algorithm is not None:
        launcher = [sys.executable, "-m", "horoplug.runner", "-np", "2"]
        command = [*launcher, *command, "--algorithm", algorithm]
        # NCCL 2.30 and newer accepts two ranks on one GPU with this variable.
        env |= {
            "HOROPLUG_ALGORITHM": algorithm,
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_MAX_CTAS": "8",
        }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    for line in done.stdout.splitlines():
        _, mark, result = line.partition(_MARK)
        if mark:
            return dict(json.loads(result))
    last = [line for line in done.stderr.strip().splitlines() if line.strip()][-1:]
    raise RuntimeError(f"failed: {' '.join(last) or f'exit status {done.returncode}'}"[:200])


def measured() -> Iterator[Results]:
    from horoplug import _native

    known = {line.split()[1] for line in _native.algorithms().splitlines() if line.endswith(" gpu")}
    for part in "kernels", "enqueue", "step":
        with _reported(part):
            yield in_own_process(part)
    for algorithm in (each for each in ALGORITHMS if each in known):
        with _reported(f"two ranks by {algorithm}"):
            yield in_own_process("reduce", algorithm)


@contextlib.contextmanager
def _reported(part: str) -> Iterator[None]:
    """Print the name of a part and, if it fails, the reason."""
    print(f"# {part}", file=sys.stderr, flush=True)
    try:
        yield
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"# {part}: {error}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help=f"do not change {gpu_results.PAGE.name}")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--algorithm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        found = PARTS[args.part](*([args.algorithm] if args.algorithm else []))
        if os.environ.get("HOROVOD_RANK", "0") == "0":
            print(_MARK + json.dumps(found), flush=True)
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device: nothing is measured.")
    found = {}
    for results in measured():
        found.update(results)
    page = gpu_results.PAGE
    text = gpu_results.updated(page.read_text(), HOW, rows(), gpu_results.describe(), found)
    if not args.dry:
        page.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
