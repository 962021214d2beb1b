"""Elastic jobs with random faults for HOROPLUG_SOAK_SECONDS seconds: a part of `make soak`.

Processes are killed, stopped, paused so that their messages are late, told to leave, or end by themselves, at any
moment: while they train, commit, recover or start, one or several at once. In the end all processes have made the same
steps, none of which was lost or made twice; their parameters are the same, bit for bit, and those of an undisturbed run
up to rounding."""

import contextlib
import hashlib
import os
import random
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.harness.elastic_launcher import start
from tests.harness.in_place_training import ends, program, undisturbed
from tests.harness.support import seed

SECONDS = float(os.environ.get("HOROPLUG_SOAK_SECONDS", "60"))
LIMIT = 200.0  # seconds for a job
STEPS = 200
LONGEST_PAUSE = 3.0  # seconds; shorter than a stopped process goes unnoticed
RESUME_SECONDS = 30.0  # after the start of a job; longer than a stopped process goes unnoticed
FAULTS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "pause": signal.SIGSTOP,
    "end": signal.SIGTERM,
    "leave": signal.SIGUSR1,
}


class Job:
    """A job whose live processes are known from the launcher's messages."""

    def __init__(self, size: int, minimum: int, draw: random.Random, folder: Path) -> None:
        self.draw = draw
        self.parameters = folder / "parameters"
        flags = ["--verbose", "--gloo-timeout-seconds", 4, "--blacklist-cooldown-range", 1, 1]
        training = program(STEPS, pause=0.01)
        self.process = start(
            *("-np", size, "--min-np", minimum, *flags, sys.executable, *training),
            HOROPLUG_NOTICE_SIGNAL="SIGUSR1",
            PARAMETERS=str(self.parameters),
            FULL_SIZE="1",  # the end waits for nobody
        )
        self.out = self.err = ""
        self.pids: dict[int, int] = {}
        self.counts = dict.fromkeys(FAULTS, 0)
        self.paused: list[tuple[float, list[int]]] = []  # until when, and the pids

    def run(self, faults: int) -> None:
        """Inject faults at random moments, and wait for the end."""
        deadline = time.monotonic() + LIMIT
        moments = sorted(self.draw.uniform(0.3, 6.0) for _ in range(faults))
        began = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                now = time.monotonic()
                assert now < deadline, f"no end after {LIMIT:g} s\n{self.out}\n{self.err}"
                for pids in [pids for end, pids in self.paused if end <= now]:
                    self.send(signal.SIGCONT, pids)
                self.paused = [each for each in self.paused if each[0] > now]
                due = min(
                    [began + moments[0] if moments else now + 1.0, *(t for t, _ in self.paused)]
                )
                for key, _ in selector.select(max(min(due, deadline) - now, 0)):
                    if not self.read(key.fileobj):
                        selector.unregister(key.fileobj)
                if moments and time.monotonic() >= began + moments[0]:
                    del moments[0]
                    self.disturb()
                elif time.monotonic() >= began + RESUME_SECONDS:
                    # A process that was stopped after its last operation is only slow for the others.
                    self.send(signal.SIGCONT, self.live())
        self.process.wait(10)

    def read(self, stream: object) -> bool:
        assert hasattr(stream, "read")
        text = stream.read()
        if not text:
            return False
        if stream is self.process.stdout:
            self.out += text
        else:
            self.err += text
            for rank, pid in re.findall(r"rank (\d+) is pid (\d+)", self.err):
                self.pids.setdefault(int(rank), int(pid))
        return True

    def disturb(self) -> None:
        live = self.live()
        kind = self.draw.choice(["kill", "kill", "stop", "pause", "pause", "end", "leave"])
        victims = self.draw.sample(live, min(len(live), self.draw.choice([1, 1, 1, 2, 3])))
        self.counts[kind] += len(victims)
        self.send(FAULTS[kind], victims)
        if kind == "pause":
            self.paused.append((time.monotonic() + self.draw.uniform(0.05, LONGEST_PAUSE), victims))

    def live(self) -> list[int]:
        """The pids of the processes that have not ended."""
        return [pid for pid in self.pids.values() if Path(f"/proc/{pid}").exists()]

    def send(self, number: int, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@pytest.mark.timeout(0)  # every job has a limit
def test_elastic_jobs_with_random_faults(tmp_path: Path) -> None:
    number = seed()
    reference = undisturbed(STEPS)
    until = time.monotonic() + SECONDS
    jobs, gave_up = 0, 0
    counts = dict.fromkeys(FAULTS, 0)
    while time.monotonic() < until:
        draw = random.Random(number + jobs)
        size = draw.randint(2, 6)
        job = Job(size, draw.randint(1, size), draw, tmp_path)
        try:
            job.run(draw.randint(0, 6))
        except BaseException:
            print(f"job {number + jobs}, size {size}")
            raise
        finally:
            job.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(30)
        jobs += 1
        for kind, count in job.counts.items():
            counts[kind] += count
        text = f"job {number + jobs - 1}, size {size}\n{job.out}\n{job.err}"
        if job.process.returncode:
            # Faults can look like a program that fails again and again.
            assert "times in a row" in job.err, text
            gave_up += 1
            continue
        found = ends(job.out)
        assert found, text
        parameters = torch.load(job.parameters)
        bits = hashlib.sha256(b"".join(p.numpy().tobytes() for p in parameters)).hexdigest()
        assert {(end.made, end.bits) for end in found.values()} == {(STEPS, bits)}, text
        for ours, expected in zip(parameters, reference, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)
    print(f"{jobs} jobs, {gave_up} gave up, faults: {counts}")
    assert gave_up <= jobs // 5
