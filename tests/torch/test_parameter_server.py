"""examples/pytorch/parameter_server.py: programs of DataParallel and of RPC."""

import pytest
import torch

import horoplug.torch as hvd
from tests.harness.support import imported_example

pytest_plugins = ["tests.harness.jobs"]

PROGRAM = "pytorch/parameter_server.py"


@pytest.fixture(scope="module")
def job(pool):
    with pool.ranks(3) as ranks:
        yield ranks


def test_data_parallel_gives_the_result_of_one_process(job):
    def train():
        example = imported_example(PROGRAM)
        trained = example.data_parallel(6)
        alone = example.network()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            example.loss_of(alone, *example.batch(step)).backward()
            optimizer.step()
        torch.testing.assert_close(dict(trained.named_parameters()), dict(alone.named_parameters()))

    job.run(train)


def test_parameter_server_learns(job):
    def train():
        example = imported_example(PROGRAM)
        server = example.parameter_server(40)
        if server is None:
            return None
        test = example.batch(0, 99)
        losses = [example.loss_of(each, *test).item() for each in (example.network(), server.model)]
        return server.updates, losses

    (updates, (before, after)), *others = job.run(train)
    assert others == [None, None]
    assert updates == 2 * 40
    assert after < before


def test_exceptions_of_the_server_are_raised_by_the_caller(job):
    def train():
        example = imported_example(PROGRAM)
        if hvd.rank() == 0:
            example.serve([], [1, 2])
            return
        with pytest.raises(ValueError, match="not in list"):
            example.call(0, "index", "nothing")
        example.call(0, "append", hvd.rank())
        example.stop(0)

    job.run(train)
