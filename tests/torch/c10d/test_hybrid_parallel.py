"""examples/pytorch/hybrid_parallel.py on four ranks."""

from tests.harness.process_groups import process_groups
from tests.harness.support import imported_example

pytest_plugins = ["tests.harness.jobs"]

groups = process_groups("aaaa")


def train():
    assert imported_example("pytorch/hybrid_parallel.py").difference(5) < 1e-6


def test_tensor_and_data_parallel_training_gives_the_result_of_one_process(groups):
    groups.run(train)
