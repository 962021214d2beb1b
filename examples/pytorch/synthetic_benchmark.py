"""Measure how many images per second a ResNet-50 trains on, with synthetic images.

    horovodrun -np 2 python examples/pytorch/synthetic_benchmark.py --batch-size 8 --num-iters 3   # minutes on a CPU
    python examples/pytorch/synthetic_benchmark.py --model tiny --image-size 32                    # seconds on a CPU

The script defines the model itself and needs only PyTorch. Options and figures are those of Horovod's benchmark.
"""

import argparse
import os
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

import horoplug.torch as hvd

try:
    from tqdm import tqdm  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:  # then without a progress bar
    tqdm = None

# Name: (channels of the first stage, blocks of the four stages).
MODELS = {
    "tiny": (8, (1, 1, 1, 1)),
    "resnet50": (64, (3, 4, 6, 3)),
    "resnet101": (64, (3, 4, 23, 3)),
    "resnet152": (64, (3, 8, 36, 3)),
}
CLASSES = 1000


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that changes the size by its stride only, and batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """A residual block: a 1x1 convolution to ``width`` channels, a 3x3 one, and a 1x1 one to ``4 * width`` channels."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            convolution(width, 4 * width, 1),
        )
        same = inputs == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(width: int, blocks: tuple[int, ...]) -> nn.Sequential:
    """A network that maps images (count, 3, side, side) to class scores (count, 1000). Each stage except the first
    halves the side and doubles the number of channels."""
    layers: list[nn.Module] = [
        convolution(3, width, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    inputs = width
    for stage, count in enumerate(blocks):
        channels = width << stage
        for block in range(count):
            layers.append(Bottleneck(inputs, channels, 2 if stage > 0 and block == 0 else 1))
            inputs = 4 * channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
    return nn.Sequential(*layers)


def steps(count: int, what: str) -> Iterable[int]:
    if tqdm is not None and hvd.rank() == 0:
        return tqdm(range(count), desc=what, unit="batch", leave=False)
    return range(count)


def spread(rates: torch.Tensor) -> str:
    """Mean and 95 % confidence interval: 1.96 standard deviations to either side."""
    return f"{rates.mean().item():.1f} +-{1.96 * rates.std(correction=0).item():.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    narrow = parser.add_mutually_exclusive_group()
    narrow.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    narrow.add_argument("--bf16-allreduce", action="store_true", help="send gradients as bfloat16")
    add = parser.add_argument
    add("--model", choices=MODELS, default="resnet50", help="the model to train")
    add("--batch-size", type=int, default=32, help="images per process and step")
    add("--image-size", type=int, default=224, help="height and width of the images in pixels")
    add("--num-warmup-batches", type=int, default=10, help="batches that are not timed")
    add("--num-batches-per-iter", type=int, default=10, help="batches per timed iteration")
    add("--num-iters", type=int, default=10, help="number of timed iterations")
    add("--use-adasum", action="store_true", help="combine gradients with Adasum")
    add("--no-cuda", action="store_true", help="accepted and ignored: the CPU is always used")
    add("--threads", type=int, help="threads per process; default: its share of the cores")
    args = parser.parse_args()

    hvd.init()

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(args.threads or max(1, cores // hvd.local_size()))
    torch.manual_seed(hvd.rank())  # images differ between processes
    model = resnet(*MODELS[args.model])
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(CLASSES, (args.batch_size,))

    # Adasum adapts to the number of processes by itself.
    rate = 0.01 * (1 if args.use_adasum else hvd.size())
    compression = hvd.Compression.none
    if args.fp16_allreduce:
        compression = hvd.Compression.fp16
    elif args.bf16_allreduce:
        compression = hvd.Compression.bf16
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    say = print if hvd.rank() == 0 else lambda *_, **__: None
    parameters = sum(p.numel() for p in model.parameters())
    say(
        f"{args.model}, {parameters / 1e6:.1f} M parameters, batch size {args.batch_size}",
        flush=True,
    )
    say(f"{hvd.size()} CPU process(es), {torch.get_num_threads()} thread(s) each", flush=True)

    for _ in steps(args.num_warmup_batches, "warm-up"):
        step()
    totals = []
    for iteration in range(args.num_iters):
        started = time.perf_counter()
        for _ in steps(args.num_batches_per_iter, f"iteration {iteration + 1}/{args.num_iters}"):
            step()
        seconds = time.perf_counter() - started
        mine = torch.tensor(args.batch_size * args.num_batches_per_iter / seconds)
        totals.append(hvd.allreduce(mine, op=hvd.Sum).item())
        say(
            f"iteration {iteration + 1}/{args.num_iters}: "
            f"{totals[-1] / hvd.size():.1f} images/s per CPU process",
            flush=True,
        )
    rates = torch.tensor(totals, dtype=torch.float64)
    say(f"images/s per CPU process: {spread(rates / hvd.size())}")
    say(f"images/s on {hvd.size()} CPU process(es): {spread(rates)}", flush=True)


if __name__ == "__main__":
    main()
