"""Elastic jobs in a Slurm job with two nodes, run by real Slurm daemons. The other node is reached by srun."""

import re
import sys

from tests.harness import program_text
from tests.harness.elastic_launcher import launcher_lines
from tests.harness.slurm_daemons import HOST, OTHER, allocated, slurm, without_ssh

__all__ = ["allocated", "slurm", "without_ssh"]  # fixtures

# Trains until the job has a size that a replacement or a loss brings about, and for some more steps.
TRAIN = program_text("tests/elastic/programs/slurm.py")


def job(allocated, without_ssh, *, victim, action, size):
    """Run the program, whose process ``victim`` kills itself or cancels its step. Returns who has ended it, and the
    launcher's lines. There is no ssh."""
    env, log = without_ssh
    command = [sys.executable, "-c", TRAIN, victim, action, size]
    status, output = allocated(
        sys.executable, "-m", "horoplug.runner", "--min-np", 2, *command, **env
    )
    assert status == 0, output
    assert not log.exists()
    done = re.findall(r"done (\d+) on (\S+) rank (\d) of (\d)", output)
    return sorted(
        (int(rank), int(process), node) for process, node, rank, _ in done
    ), launcher_lines(output)


def test_killed_process_on_another_node_is_replaced(allocated, without_ssh):
    done, lines = job(allocated, without_ssh, victim=2, action="kill", size=4)
    assert done == [(0, 0, HOST), (1, 1, HOST), (2, 3, OTHER), (3, 4, OTHER)]
    assert lines[0] == f"process 2 (rank 2) on {OTHER} was killed by signal 9 (SIGKILL)"


def test_job_goes_on_without_a_node_whose_step_has_ended(allocated, without_ssh):
    done, lines = job(allocated, without_ssh, victim=0, action="cancel", size=2)
    assert done == [(0, 0, HOST), (1, 1, HOST)]
    # Slurm kills srun and the processes of the step in any order, and srun may not be able to say why.
    (lost,) = [line for line in lines if line.startswith(f"host {OTHER}: ")]
    reason = "(.*CANCELLED.*|srun.*)"
    assert re.fullmatch(
        f"host {OTHER}: the connection was lost: {reason}; it gets no new processes for now", lost
    )
