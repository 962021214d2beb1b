"""Elastic jobs whose processes are started by something else than agents (horoplug/runner/elastic_worker_job.py)."""

import json
import signal
import subprocess
import sys
import threading

import pytest

from horoplug.runner.elastic.roster import make_limits
from horoplug.runner.elastic_worker_job import ElasticWorkerJob
from horoplug.runner.ending.finish import Finish
from horoplug.runner.terms import Terms
from tests.harness import program_text
from tests.harness.limits import scaled
from tests.harness.support import environment

_PROGRAM = program_text("tests/elastic/programs/worker_job.py")


class _Processes:
    """Starts each process of a job on this machine. ``dying``: at which step a process kills itself."""

    def __init__(self, dying=None):
        self.dying = dying or {}
        self.job = None
        self.said, self.texts, self.started = [], {}, []
        self._running = {}

    def start(self, start):
        self.started.append(start)
        variables = json.dumps([self.job.environment(start), self.dying.get(start.process)])
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._running[start.process] = process
        threading.Thread(target=self._wait, args=(start.process, process, variables)).start()

    def _wait(self, number, process, variables):
        _, text = process.communicate(variables, timeout=scaled(100))
        self.texts[number] = text
        code = process.returncode
        self.job.ended(number, code, f"ended with {code}")

    def kill(self, process):
        self._running[process].kill()

    def hosts_changed(self):
        pass

    def finish(self):
        pass

    def fail(self, finish):
        for process in self._running.values():
            process.kill()

    def say(self, text):
        self.said.append(text)


def _run(processes, slots, minimum, **numbers):
    limits = make_limits(minimum, 3, **numbers)
    with ElasticWorkerJob(processes, limits, slots) as job:
        processes.job = job
        return job.run()


def test_a_killed_process_is_replaced_and_all_end_with_the_same_state():
    processes = _Processes({1: 5})
    assert _run(processes, {"a": 2, "b": 2}, 2, wait=60) == Finish()
    assert [start.host for start in processes.started][:3] == ["a", "a", "b"]
    assert len(processes.started) == 4
    ends = sorted(processes.texts[each].split()[-4:] for each in (0, 2, 3))
    assert [end[:2] for end in ends] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert {end[3] for end in ends} == {"True"}
    assert any(f"process 1 (rank 1) on a ended with {-signal.SIGKILL}" in t for t in processes.said)


def test_a_job_without_enough_processes_fails_with_the_first_failure():
    processes = _Processes({0: 2, 1: 2, 2: 2})
    outcome = _run(processes, {"a": 3}, 3, wait=60, resets=0)
    assert outcome.code == 128 + signal.SIGKILL
    assert "ended with -9" in outcome.text(Terms())
    assert outcome.process in (0, 1, 2)


def test_a_reported_host_is_used_and_a_lost_one_is_not():
    processes = _Processes()
    started = threading.Event()
    start = processes.start

    def start_and_tell(each):
        start(each)
        started.set()

    processes.start = start_and_tell
    with ElasticWorkerJob(processes, make_limits(1, 3, wait=60, hosts_may_come=True), {}) as job:
        processes.job = job
        found = []
        thread = threading.Thread(target=lambda: found.append(job.run()))
        thread.start()
        job.hosts_found({"a": 1})
        assert started.wait(scaled(60))
        job.host_lost("a", "its node is gone")
        processes.kill(0)
        job.hosts_found({"b": 3})
        thread.join(scaled(100))
    assert found == [Finish()]
    assert [each.host for each in processes.started] == ["a", "b", "b", "b"]
    assert any(text.startswith("host a: its node is gone") for text in processes.said)


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [
        (0, 2, "min_num_proc=0: at least 1 is wanted"),
        (3, 2, "min_num_proc 3 is more than max_num_proc 2"),
    ],
)
def test_wrong_numbers_of_processes_are_refused(least, most, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        make_limits(least, most)
