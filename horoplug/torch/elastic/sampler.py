"""A sampler that records which samples of an epoch were processed, for any number of ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch.utils.data

from horoplug.torch.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Distributes the samples of a dataset over the ranks. After a restart, it distributes only those that were not
    processed.

    Put it into the :class:`TorchState`, call :meth:`record_batch` after each batch, and :meth:`set_epoch` at the *end*
    of an epoch, so that an interrupted epoch is continued instead of repeated.

    The order is Horovod's. If ``shuffle`` is set, ``random.Random(seed + epoch)`` shuffles all indices. The first
    ``processed_num`` indices are dropped, and the remaining ones are repeated from their start until their number is a
    multiple of the number of ranks. Rank r takes the indices at positions r, r + size, r + 2 * size and so on.
    ``dataset`` must not change its length; ``seed`` is the same on all ranks.

    Example, on two ranks:

        sampler = hvd.elastic.ElasticSampler(range(6), shuffle=False)
        list(sampler)  # -> [0, 2, 4] on rank 0, [1, 3, 5] on rank 1
        sampler.record_batch(0, batch_size=2)  # 2 samples on each rank
        sampler.reset()
        list(sampler)  # -> [4] on rank 0, [5] on rank 1
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        """Number of samples of this epoch that all ranks together have processed."""
        self.processed_indices: set[int] = set()  # always empty; kept for older programs
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch with no samples processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of ``batch_size`` samples. (``batch_idx`` is not used.)"""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """``epoch`` and ``processed_num``, the same on all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the progress in ``state_dict``."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the samples that were not processed over the current ranks."""
        self.num_replicas = size()
        self.rank = rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        self.indices = list(padded)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
