"""Jobs whose processes are started by something else than the launcher's agents (horoplug/runner/worker_job.py)."""

import concurrent.futures
import json
import os
import subprocess
import sys

from horoplug.runner.worker_job import WorkerJob, enter, leave
from tests.harness.limits import scaled

_PROGRAM = """
import json, os, sys
from horoplug.runner.worker_job import enter
enter(json.loads(sys.stdin.read()))
import numpy as np
import horoplug.numpy as hvd
hvd.init()
print(hvd.allreduce(np.array([hvd.rank()]), op=hvd.Sum)[0], hvd.rank(), hvd.local_rank(), hvd.cross_rank())
"""


def _run(variables: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps(variables),
        stdout=subprocess.PIPE,
        text=True,
        timeout=scaled(60),
        check=True,
    ).stdout.strip()


def test_ranks_fill_one_host_after_the_other():
    with WorkerJob(["a", "b", "a", "c", "b"]) as job:
        assert job.ranks == [0, 2, 1, 4, 3]
        assert job.by_rank == [0, 2, 1, 4, 3]
        last = job.environment(4)
    assert last["HOROVOD_RANK"] == "3"
    assert last["HOROVOD_SIZE"] == "5"
    assert (last["HOROVOD_LOCAL_RANK"], last["HOROVOD_LOCAL_SIZE"]) == ("1", "2")
    assert (last["HOROVOD_CROSS_RANK"], last["HOROVOD_CROSS_SIZE"]) == ("1", "2")
    assert last["HOROVOD_HOSTNAME"] == "b"


def test_ranks_are_in_the_order_of_the_workers_if_asked():
    with WorkerJob(["a", "b", "a"], keep_order=True) as job:
        assert job.ranks == job.by_rank == [0, 1, 2]
        found = [job.environment(worker) for worker in range(3)]
    assert [each["HOROVOD_RANK"] for each in found] == ["0", "1", "2"]
    assert [each["HOROVOD_LOCAL_RANK"] for each in found] == ["0", "0", "1"]
    assert [each["HOROVOD_CROSS_RANK"] for each in found] == ["0", "1", "0"]


def test_workers_on_two_hosts_reduce_across_them():
    with WorkerJob(["a", "b", "a"]) as job, concurrent.futures.ThreadPoolExecutor() as threads:
        lines = list(threads.map(_run, map(job.environment, range(3))))
    assert lines == ["3 0 0 0", "3 2 0 1", "3 1 1 0"]


def test_variables_of_an_earlier_job_are_removed_and_restored():
    env = {"HOROPLUG_RANK": "7", "HOROVOD_ELASTIC_PROCESS": "3", "HOME": "/root"}
    before = dict(env)
    with WorkerJob(["a"]) as job:
        saved = enter(job.environment(0), env)
    assert "HOROPLUG_RANK" not in env
    assert "HOROVOD_ELASTIC_PROCESS" not in env
    assert env["HOROVOD_RANK"] == "0"
    leave(saved, env)
    assert env == before


def test_settings_are_passed_to_all_workers():
    with WorkerJob(["a", "a"], settings={"CYCLE_TIME": "2"}) as job:
        assert {job.environment(worker)["HOROVOD_CYCLE_TIME"] for worker in (0, 1)} == {"2"}
    assert os.environ.get("HOROVOD_CYCLE_TIME") is None
