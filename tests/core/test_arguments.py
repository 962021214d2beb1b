"""Every argument of the functions for NumPy arrays has an effect, or the users' guide says that it has none."""

import horoplug as hvd
from tests.harness import operation_arguments
from tests.harness.operation_arguments import array, unseen_by_all

pytest_plugins = ["tests.harness.jobs"]


def check():
    # horoplug.run is the launcher's: tests/launcher/test_run.py.
    return operation_arguments.check(hvd, array, skipped=("run",))


def test_every_argument_has_an_effect(pool):
    with pool.ranks(2) as job:
        assert unseen_by_all(job.run(check)) == []
