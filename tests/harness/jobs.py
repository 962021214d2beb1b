"""The fixture ``pool``, which runs tests on real ranks. A test module requests it with
``pytest_plugins = ["tests.harness.jobs"]``."""

import pytest

from tests.harness.support import QUICK_XLA, Pool

# By folder of tests. The processes for all other folders import what a test uses.
_POOLS = {
    "": Pool(),
    "torch": Pool(modules=["torch", "torch._dynamo", "horoplug.torch"]),
    "c10d": Pool(
        modules=[
            "torch",
            "torch._dynamo",  # which DDP imports in its first use
            "torch.distributed.fsdp",
            "torch.distributed.tensor",
            "horoplug.torch.c10d",
        ]
    ),
    "tensorflow": Pool(modules=["tensorflow", "horoplug.tensorflow"]),
    "jax": Pool(variables=QUICK_XLA, modules=["jax", "horoplug.jax"]),
}


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Pool:
    """A pool of processes for jobs; see support.py."""
    return _POOLS.get(request.path.parent.name, _POOLS[""])


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the processes after the last module that uses them, since later tests may look for leftover processes."""
    following = getattr(nextitem, "module", None)
    if __name__ not in getattr(following, "pytest_plugins", []):
        for pool in _POOLS.values():
            pool.end_workers()
    if nextitem is None or nextitem.path.name == "test_leftovers.py":
        for pool in _POOLS.values():
            pool.close()
