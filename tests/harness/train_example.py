"""The training example of PyTorch: a small data set for it, and its printed summary."""

import gzip
import json
import struct

import numpy as np

from tests.harness import ROOT

TRAIN = ROOT / "examples" / "pytorch" / "train.py"


def write_fashion_mnist(folder, count=300):
    """Write files in Fashion-MNIST's format; each class is a different bright row."""
    draw = np.random.default_rng(0)
    for prefix in ("train", "t10k"):
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        images = draw.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        images[np.arange(count), 2 * labels + 3] = 255
        for array, name in ((images, "images-idx3"), (labels, "labels-idx1")):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            content = gzip.compress(header + array.tobytes(), 1)
            (folder / f"{prefix}-{name}-ubyte.gz").write_bytes(content)


def summary(done):
    """The JSON in the last line of rank 0; the other ranks print nothing."""
    for process in done:
        assert process.returncode == 0, process.stdout + process.stderr
    assert not any(process.stdout for process in done[1:])
    return json.loads(done[0].stdout.splitlines()[-1])
