"""Allreduces in the wire format "int8" with error feedback, compared with a reference. Two ranks on each of two hosts.

The format is not offered to users yet, so a compressor of the test names its code."""

import os
import sys

import numpy as np
from mpi4py import MPI

os.environ["HOROVOD_HOSTNAME"] = f"host{MPI.COMM_WORLD.rank % 2}"

import torch

import horoplug.torch as hvd
from horoplug.common.context import context

INT8_BLOCKS = 128  # kInt8Blocks of csrc/base/wire_format.h
BLOCK = 60
COUNTS = (1, 7, 4097, 300_003)
STEPS = 12


Int8 = type("Int8", (hvd.Compression.fp16,), {"wire_dtype": INT8_BLOCKS})


def through_int8(values):
    """What is decoded of encoded float32 values."""
    blocks = np.zeros((-(-len(values) // BLOCK), BLOCK), np.float32)
    blocks.ravel()[: len(values)] = values
    factors = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.clip(np.rint(blocks / np.where(factors > 0, factors, 1)), -127, 127)
    return (codes * factors).ravel()[: len(values)]


class Reference:
    def __init__(self, ranks):
        self.residuals = [{} for _ in range(ranks)]

    def allreduce(self, name, inputs):
        total = np.zeros_like(inputs[0])
        for residuals, values in zip(self.residuals, inputs, strict=True):
            values = values + residuals.get(name, np.float32(0))
            sent = through_int8(values)
            residuals[name] = values - sent
            total += sent
        return through_int8(total / np.float32(len(inputs)))


def values(rank, step, count):
    random = np.random.default_rng([int(sys.argv[1]), rank, step, count])
    return random.uniform(-3, 3, count).astype(np.float32)


def main():
    hvd.init()
    reference = Reference(hvd.size())
    for step in range(STEPS):
        for count in COUNTS:
            inputs = [values(rank, step, count) for rank in range(hvd.size())]
            name = f"gradient.{count}"
            tensor = torch.from_numpy(inputs[hvd.rank()])
            result = hvd.allreduce(tensor, name=name, compression=Int8)
            np.testing.assert_array_equal(result.numpy(), reference.allreduce(name, inputs))
    assert context.engine().stats()["planned_batches"] > 0
    sys.stdout.write(f"rank {hvd.rank()} is done\n")


main()
