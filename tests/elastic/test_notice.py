"""Notice: a process, or the whole job, is told that it has to end soon."""

import os
import re
import signal
import sys

import pytest

from horoplug.common.notice import FILE_SECONDS, Notice
from tests.harness import program_text
from tests.harness.elastic_launcher import finish, launched, launcher_lines, start
from tests.harness.slurm_daemons import HOST, batch, slurm

__all__ = ["slurm"]  # a fixture

# A program with its own checkpoint. WAIT: whether it goes on, step by step, until it is told to end.
TRAIN = program_text("tests/elastic/programs/notice.py")


def program(*, waits, fail=None):
    failing = [] if fail is None else [",".join(map(str, fail))]
    return [sys.executable, "-c", TRAIN, "waits" if waits else "ends", *failing]


def notices(out):
    """By process, its rank, the size of the job and the step at which the callback was called."""
    found = re.findall(r"notice (\d+) rank (\d+) of (\d+) step (\d+)", out)
    return {int(process): tuple(map(int, rest)) for process, *rest in found}


def start_and_notify(tmp_path, *arguments, fail=None, **variables):
    """A job whose launcher is told to end it, once a process has made a few steps. Returns code, out, err."""
    process = start(
        *arguments,
        *program(waits=True, fail=fail),
        CHECKPOINT=str(tmp_path / "checkpoint"),
        HOROPLUG_NOTICE_SIGNAL="SIGUSR1",
        **variables,
    )
    first = process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    code, out, err = finish(process)
    return code, first + out, err


@pytest.mark.parametrize("size", [1, 3])
def test_job_that_was_told_to_end_writes_a_checkpoint_from_which_the_next_one_goes_on(
    size, tmp_path
):
    code, out, err = start_and_notify(tmp_path, "-np", size, "--min-np", 1)
    assert code == os.EX_TEMPFAIL, err
    found = notices(out)
    (step,) = {step for _, _, step in found.values()}
    assert found == {rank: (rank, size, step) for rank in range(size)}
    assert "done" not in out
    assert launcher_lines(err) == [
        "the job was told to end",
        "the job has ended because it was told to",
    ]
    code, out, err = launched(
        *("-np", size, "--min-np", 1),
        *program(waits=True),
        CHECKPOINT=str(tmp_path / "checkpoint"),
    )
    assert code == 0, err
    assert set(re.findall("from .*", out)) == {f"from {step} to {step + 20}"}


def test_failure_before_the_job_has_ended_is_recovered_from_first(tmp_path):
    """The process that fails is not replaced any more."""
    code, out, err = start_and_notify(tmp_path, "-np", 3, "--min-np", 1, fail=(1, 5))
    assert code == os.EX_TEMPFAIL, err
    assert notices(out).keys() >= {0, 2}
    assert launcher_lines(err)[-1] == "the job has ended because it was told to"


def test_job_without_a_notice_calls_no_callback(tmp_path):
    code, out, err = launched(
        *("-np", 2, "--min-np", 1),
        *program(waits=False),
        CHECKPOINT=str(tmp_path / "checkpoint"),
        HOROPLUG_NOTICE_SIGNAL="SIGUSR1",
    )
    assert code == 0, err
    assert notices(out) == {}
    assert out.count("done") == 2


def test_process_whose_file_of_notice_exists_leaves(tmp_path):
    """All processes see the file; as many leave as the smallest number of processes allows."""
    file = tmp_path / "notice"
    fail = f"""
import time
FILE = Path({str(file)!r})
"""
    text = TRAIN.replace("hvd.init()", fail + "hvd.init()", 1).replace(
        'say("step 5 of", ME)',
        "(FILE.touch() if hvd.rank() == 0 else None)",
    )
    text = text.replace("begin + 20", "begin + 2000")
    text = text.replace("state.commit()", "state.commit(); time.sleep(0.002)", 1)
    code, _, err = launched(
        *("-np", 2, "--min-np", 1, sys.executable, "-c", text, "ends"),
        CHECKPOINT=str(tmp_path / "checkpoint"),
        HOROPLUG_NOTICE_FILE=str(file),
    )
    assert code == 0, err
    told = [line for line in launcher_lines(err) if line.endswith("was told to leave")]
    assert told, err


def test_file_of_notice_is_looked_for_about_once_a_second(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("horoplug.common.notice.time.monotonic", lambda: now)
    notice, file = Notice(), tmp_path / "notice"
    notice.watch(None, str(file))
    assert not notice.is_given()
    file.touch()
    now += FILE_SECONDS / 2
    assert not notice.is_given()
    now += FILE_SECONDS / 2
    assert notice.is_given()
    file.unlink()
    now += FILE_SECONDS
    assert notice.is_given()


def test_requeue_outside_of_slurm_is_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code, _, err = start_and_notify(tmp_path, "-np", 1, "--min-np", 1, HOROPLUG_REQUEUE="1")
    assert code == os.EX_TEMPFAIL, err
    assert "the job cannot be requeued (HOROPLUG_REQUEUE): it is not in a job of Slurm" in (
        launcher_lines(err)
    )


def test_slurm_runs_the_job_again_from_its_checkpoint(slurm, tmp_path):
    """Slurm signals the batch script, which has become horovodrun, as `sbatch --signal=B:USR1@60` does."""
    train, script = tmp_path / "train.py", tmp_path / "script.sh"
    train.write_text(TRAIN)
    script.write_text(f"""#!/bin/bash
export HOROPLUG_NOTICE_SIGNAL=SIGUSR1 HOROPLUG_REQUEUE=1 CHECKPOINT={tmp_path}/checkpoint
if [ -z "$SLURM_RESTART_COUNT" ]; then
  (until grep -q "step 5 of" {tmp_path}/script.output; do sleep 0.1; done
   scancel --batch --signal=USR1 $SLURM_JOB_ID) &
fi
echo "restarts: ${{SLURM_RESTART_COUNT:-0}}"
exec {sys.executable} -m horoplug.runner -np 2 --min-np 1 {sys.executable} {train} waits
""")
    flags = ("-w", HOST, "-n", "2", "--requeue", "--open-mode=append")
    out = batch(slurm, script, *flags, limit=150)  # Slurm starts a job again after a while
    assert re.findall(r"restarts: \d", out) == ["restarts: 0", "restarts: 1"]
    found = notices(out)
    (step,) = {step for _, _, step in found.values()}
    assert found == {rank: (rank, 2, step) for rank in range(2)}
    assert len(re.findall(f"from {step} to {step + 20}$", out, re.MULTILINE)) == 2
