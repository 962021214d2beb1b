"""PyTorch's own tests of its backends, which its wheel contains, for horoplug.

Not collected by default: ``make test-c10d`` runs all cases (compare_with_gloo.py), and test_pytorch_suite.py some of
them. The variable WORLD_SIZE is the number of ranks. BACKEND=horoplug with HOROPLUG_AS_GLOO=0 runs the cases under the
backend's own name. Without BACKEND, horoplug is in place of Gloo, and HOROPLUG_AS_GLOO=0 runs the cases on Gloo itself.
The variable RESULTS names a file for the outcomes, one case on each line."""

import multiprocessing
import os
import shutil
import tempfile
import unittest

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("HOROPLUG_AS_GLOO", "1")
os.environ.setdefault("WORLD_SIZE", "3")
# A process that multiprocessing spawns imports this file once more, and has the variable from its parent.
os.environ.setdefault("TEMP_DIR", f"{tempfile.gettempdir()}/horoplug-c10d-{os.getpid()}")
os.environ["INIT_METHOD"] = f"file://{os.environ['TEMP_DIR']}/init"

import torch.distributed as dist
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

import horoplug.torch_plugin

horoplug.torch_plugin.register()
replaced = "horoplug" in dist.ProcessGroupGloo.__module__
assert replaced == (os.environ["HOROPLUG_AS_GLOO"] == "1")


class TestBackend(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        # Ten times as fast as to start an interpreter for each rank of each case.
        self._start_processes(multiprocessing.get_context("fork").Process)


class Result(unittest.TextTestResult):
    """Also writes the outcomes to a file: the ranks print, too, so that they could not be found on stdout."""

    def record(self, test: unittest.TestCase, outcome: str) -> None:
        if file := os.environ.get("RESULTS"):
            with open(file, "a") as results:
                results.write(f"{test.id().rpartition('.')[2]} {outcome}\n")

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self.record(test, "passes")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self.record(test, "is skipped")

    def addFailure(self, test: unittest.TestCase, error) -> None:
        super().addFailure(test, error)
        self.record(test, "fails")

    def addError(self, test: unittest.TestCase, error) -> None:
        super().addError(test, error)
        self.record(test, "fails")


if __name__ == "__main__":
    folder = os.environ["TEMP_DIR"]
    os.makedirs(folder, exist_ok=True)
    try:
        unittest.main(testRunner=unittest.TextTestRunner(resultclass=Result))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
