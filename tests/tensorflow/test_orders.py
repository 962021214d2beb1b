"""Ranks start the operations of a graph in different orders. TensorFlow has one thread for operations, so that a kernel
that blocks it would keep the others from running. Where there is the environment .venv-oldest
(requirements/tensorflow-oldest.txt), also with the oldest supported TensorFlow, whose kernels are derived from
TensorFlow's C++ class (csrc/bindings/tensorflow/derived_kernel.h)."""

import sys

import pytest

from tests.harness import ROOT
from tests.harness.checks import tensorflow_orders as of_orders
from tests.harness.support import Pool, seed

pytest.importorskip("tensorflow")
pytest.importorskip("horoplug.tensorflow")

OLDEST = ROOT / ".venv-oldest" / "bin" / "python"
ONE_THREAD = {"TF_NUM_INTEROP_THREADS": "1"}
# Operations that block fail soon, with their names.
LIMITS = {"HOROPLUG_OPERATION_TIMEOUT_SECONDS": "30", "HOROVOD_DEADLOCK_TIME_SECONDS": "2"}


@pytest.fixture(
    scope="module",
    params=["current", "derived", pytest.param("oldest", marks=pytest.mark.matrix)],
)
def ranks(request):
    if request.param == "oldest" and not OLDEST.exists():
        pytest.skip(f"{OLDEST} does not exist")
    kernels = {"HOROPLUG_TENSORFLOW_KERNELS": "derived"} if request.param == "derived" else {}
    python = OLDEST if request.param == "oldest" else sys.executable
    pool = Pool(python, ONE_THREAD, modules=["tensorflow"])
    try:
        with pool.ranks(2, env=LIMITS | kernels) as job:
            yield job
    finally:
        pool.close()


@pytest.mark.parametrize("check", of_orders.CHECKS, ids=lambda check: check.__name__)
def test_ranks_start_operations_in_opposite_orders(ranks, check):
    ranks.run(check)


def test_ranks_start_operations_in_random_orders(ranks):
    ranks.run(of_orders.check_any_order, seed())
