"""A stream that trains with PyTorch: steps of a DistributedOptimizer."""

import random

import numpy as np

import horoplug as hvd


class Training:
    """A linear model whose gradient is its input, so that its weights are known after each step."""

    def __init__(
        self, number: int, process_set: hvd.ProcessSet, rank: int, size: int, seed: int
    ) -> None:
        import torch

        import horoplug.torch as hvd

        draw = random.Random(seed)
        self._inputs = np.random.default_rng(seed)
        self._rank, self._size = rank, size
        self._passes = draw.choice([1, 1, 2])
        shapes = [(draw.choice([1, 100, 20_000]),) for _ in range(draw.randint(1, 6))]
        self._weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self._expected = [np.zeros(shape) for shape in shapes]
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._weights, lr=0.5),
            [(f"s{number}.{i}", weight) for i, weight in enumerate(self._weights)],
            process_set=process_set,
            backward_passes_per_step=self._passes,
            num_groups=draw.choice([0, 0, 2]),
        )

    @staticmethod
    def prepare() -> None:
        """Start the threads in which PyTorch computes gradients."""
        import torch

        torch.ones(2, requires_grad=True).sum().backward()

    def step(self) -> int:
        """Returns the number of gradients that were reduced. AssertionError: a weight is wrong."""
        import torch

        totals = [np.zeros_like(each) for each in self._expected]
        self._optimizer.zero_grad()
        for _ in range(self._passes):
            loss = torch.zeros(())
            for weight, total in zip(self._weights, totals, strict=True):
                # Of all ranks; integers, so that sums are exact.
                every = self._inputs.integers(0, 8, (self._size, *total.shape))
                total += every.sum(0)
                loss = loss + (weight * torch.from_numpy(every[self._rank])).sum()
            loss.backward()
        self._optimizer.step()
        for weight, expected, total in zip(self._weights, self._expected, totals, strict=True):
            expected -= 0.5 * total / self._size
            found = weight.detach().numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg="weights of a training")
        return len(self._weights)
