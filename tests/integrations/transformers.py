"""Accelerate and the Trainer of Transformers on CPUs, with horoplug's backend of torch.distributed."""

import os
import sys

import pytest

from tests.harness.integrations import runs
from tests.harness.support import seed

PROGRAM = runs.FOLDER / "transformers_training.py"
# Accelerate starts several processes of one machine by torchrun, or by mpirun with --cpu and a file of hosts.
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2", "--multi_gpu"]
# Without these, Accelerate asks for a configuration file of the user.
LAUNCH += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
STARTS = {
    "accelerate launch, as gloo": (LAUNCH, {"HOROPLUG_AS_GLOO": "1"}, ""),
    "torchrun, as gloo": (runs.torchrun(), {"HOROPLUG_AS_GLOO": "1"}, ""),
    "torchrun, by name": (runs.torchrun(), {}, "horoplug"),
}


@pytest.mark.parametrize("library", ["trainer", "accelerate"])
def test_small_transformer_trains(library, tmp_path):
    """The parameters are equal on all ranks, and those of the run on gloo."""
    key = seed() % 10_000

    def train(start, variables, backend):
        folder = runs.empty(tmp_path / "run")
        command = [*start, PROGRAM, folder, key, library, backend]
        runs.run(command, variables | {"ACCELERATE_USE_CPU": "true"})
        return runs.results(folder)[0]

    gloo = train(runs.torchrun(), {}, "")
    assert "ProcessGroupGloo" in gloo["kind"]
    assert gloo["after"] < gloo["before"] - 0.1
    for name, arguments in STARTS.items():
        if library == "accelerate" and name == "torchrun, as gloo":
            continue
        mine = train(*arguments)
        assert mine["kind"].startswith("horoplug."), name
        assert mine["after"] == pytest.approx(gloo["after"], rel=1e-3), name
        runs.assert_close(gloo, mine, 1e-4)


def test_accelerate_launch_with_mpirun(tmp_path):
    mpi = runs.ROOT / "build" / "mpi" / "openmpi"
    if not mpi.is_dir():
        pytest.skip("make mpi installs Open MPI")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    launch = [each for each in LAUNCH if each != "--multi_gpu"]
    options = ["--cpu", f"--mpirun_hostfile={hosts}"]
    path = os.pathsep.join([str(mpi / "bin"), os.environ["PATH"]])
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables = {"HOROPLUG_AS_GLOO": "1", "PATH": path, "OPAL_PREFIX": str(mpi)} | root
    runs.run([*launch, *options, PROGRAM, tmp_path, 1, "accelerate", ""], variables)
    (found, _) = runs.results(tmp_path)
    assert found["kind"].startswith("horoplug.")
    assert found["after"] < found["before"]
