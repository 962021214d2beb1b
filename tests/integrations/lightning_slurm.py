"""Lightning under real Slurm daemons: steps of srun, and an elastic job that Slurm runs again."""

import json
import os
import re
import sys

import pytest
import torch

from tests.harness.integrations import runs
from tests.harness.slurm_daemons import HOST, batch, slurm

__all__ = ["slurm"]  # a fixture

pytest.importorskip("lightning.fabric")
TRAINING = runs.FOLDER / "lightning_training.py"
ELASTIC = runs.FOLDER / "lightning_elastic.py"
MORE = 20  # steps after the checkpoint


@pytest.fixture
def on_slurm(slurm):
    """The function of the fixture ``slurm``, with the libraries on PYTHONPATH."""
    if not runs.PATH.is_dir():
        pytest.skip("make test-integrations installs the libraries")

    def run(*command, **variables):
        paths = os.pathsep.join([str(runs.PATH), str(runs.ROOT)])
        return slurm(*map(str, command), PYTHONPATH=paths, **variables)

    return run


@pytest.mark.parametrize("strategy", ["by name", "horoplug"])
def test_trainer_under_srun_gives_the_parameters_of_horovodrun(on_slurm, tmp_path, strategy):
    """With HorovodStrategy, and with the backend under Lightning's own environment for Slurm."""
    options = json.dumps({"strategy": strategy, "seed": 5, "rate": 0.05})
    expected, found = tmp_path / "expected", tmp_path / "found"
    expected.mkdir()
    found.mkdir()
    # Lightning starts the processes of DDP itself, except under Slurm.
    start = runs.horovodrun() if strategy == "by name" else [sys.executable]
    runs.run([*start, TRAINING, expected, options])
    flags = ("-N", "1", "-n", "2", "--ntasks-per-node=2")
    status, output = on_slurm("srun", *flags, sys.executable, TRAINING, found, options)
    assert status == 0, output
    runs.assert_close(runs.results(expected)[0], runs.results(found)[0])


def test_slurm_runs_an_elastic_job_again_from_the_checkpoint_of_fabric(on_slurm, tmp_path):
    """Slurm signals the batch script, which has become horovodrun. The parameters are those of a run that was not
    interrupted."""
    undisturbed, requeued = tmp_path / "undisturbed", tmp_path / "requeued"
    undisturbed.mkdir()
    requeued.mkdir()
    elastic = [sys.executable, "-m", "horoplug.runner", "-np", "2", "--min-np", "1"]
    script = tmp_path / "script.sh"
    script.write_text(f"""#!/bin/bash
export HOROPLUG_NOTICE_SIGNAL=SIGUSR1 HOROPLUG_REQUEUE=1 WAIT=1
if [ -z "$SLURM_RESTART_COUNT" ]; then
  (until grep -q "step 5 is over" {tmp_path}/script.output; do sleep 0.1; done
   scancel --batch --signal=USR1 $SLURM_JOB_ID) &
fi
echo "restarts: ${{SLURM_RESTART_COUNT:-0}}"
exec {" ".join(elastic)} {sys.executable} {ELASTIC} {requeued} {MORE}
""")
    flags = ("-w", HOST, "-N", "1", "--ntasks-per-node=2", "--requeue", "--open-mode=append")
    output = batch(on_slurm, script, *flags, limit=150)  # Slurm starts a job again after a while
    assert re.findall(r"restarts: \d", output) == ["restarts: 0", "restarts: 1"]
    (begin,) = {int(step) for step in re.findall(r"from ([1-9]\d*) to", output)}
    found = torch.load(requeued / "result.pt", weights_only=True)
    assert begin >= 5
    assert found["step"] == begin + MORE
    runs.run([*elastic, sys.executable, ELASTIC, undisturbed, begin + MORE])
    runs.assert_close(torch.load(undisturbed / "result.pt", weights_only=True), found, 1e-4)
