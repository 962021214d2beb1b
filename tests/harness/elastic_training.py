"""Programs of elastic jobs, whose processes fail at moments that a test has chosen.

The test starts a job with :func:`launch`, in an environment that :func:`plan` makes. The program, a string, calls
:func:`train`, or calls ``Faults.at`` itself at each moment at which a process may fail. Programs that know nothing of
this are run by this module's main program, and fail in their commits. What the processes report is in files of the
test's folder."""

import contextlib
import json
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness.elastic_launcher import launcher
from tests.harness.limits import scaled
from tests.harness.support import environment

MOMENTS = ("backward", "update", "save", "commit")
"""Moments of a step: before its gradients are reduced, while the optimizer updates the parameters, before the state is
saved, and in the commit after that."""
REDUCTION = "reduction"
"""The moment at which some gradients of a step are being reduced and others are not computed yet. Not all programs have
it."""
WAITS = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3", "HOROVOD_START_TIMEOUT": "60"}


# ---- in the tests ----------------------------------------------------------------------------------------------------


def plan(folder: Path, size: int, faults: list[dict[str, Any]], **variables: str) -> dict[str, str]:
    """The environment of a job of ``size`` processes that fail as in ``faults``, one after the other. Each fault has
    the ``ranks`` that fail, the ``moment`` at which the first of them does so, the ``step`` from which on, and ``how``.
    """
    print(f"faults: {faults}")
    (folder / "faults.json").write_text(json.dumps({"size": size, "faults": faults}))
    chosen = {"TEST_FOLDER": str(folder), "PYTHONUNBUFFERED": "1", **WAITS, **variables}
    return environment() | chosen


def some_faults(key: int, size: int, hows: list[str]) -> list[dict[str, Any]]:
    """One fault at a random moment for each of ``hows``."""
    draw = random.Random(key)
    faults, step = [], 0
    for how in hows:
        step += draw.randrange(1, 5)
        faults.append(
            {
                "ranks": [draw.randrange(size)],
                "moment": draw.choice(MOMENTS),
                "step": step,
                "how": how,
            }
        )
    return faults


def command(size: int, least: int, *arguments: str, preload: str = "") -> list[str]:
    """The command line of an elastic job. ``preload``: see :mod:`tests.harness.preloading_launcher`."""
    numbers = ["-np", str(size), "--min-np", str(least)]
    return [*launcher(preload), *numbers, *arguments]


def launch(
    size: int,
    least: int,
    program: str,
    env: dict[str, str],
    *,
    flags: Sequence[str] = (),
    run_by: Sequence[str] = (),
    preload: str = "",
    timeout: float = 170,
) -> str:
    """Run a program in an elastic job that has to succeed. ``flags``: of horovodrun; ``run_by``: arguments of Python
    before the program; ``preload``: see :mod:`tests.harness.preloading_launcher`. Returns what the job has printed."""
    script = Path(env["TEST_FOLDER"]) / "train.py"
    script.write_text(program)
    arguments = command(size, least, *flags, sys.executable, *run_by, str(script), preload=preload)
    process = subprocess.Popen(
        arguments,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=scaled(timeout))
    except subprocess.TimeoutExpired:
        output = stop(process)
        raise AssertionError(f"the job was not done after {timeout:g} s:\n{output}") from None
    except BaseException:
        stop(process)
        raise
    assert process.returncode == 0, output
    print(output)
    return output


def exhaust_memory() -> None:
    """Use up the memory that this process may have, while its other threads run on. Raises MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    held = []
    while True:
        held.append(bytearray(1 << 16))


def stop(process: subprocess.Popen[str]) -> str:
    """End a job. Returns the rest of what it has printed."""
    process.terminate()  # the launcher ends the processes of the job
    try:
        return process.communicate(timeout=scaled(30))[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate(timeout=scaled(30))[0]


def check_faults(folder: Path) -> tuple[int, dict[int, dict[str, Any]], list[int]]:
    """Check that all faults of a job have occurred, and that each process that has failed was replaced by one other.
    Returns the size of the job, the first reports of all processes, and the processes that have failed."""
    planned = json.loads((folder / "faults.json").read_text())
    size, faults = planned["size"], planned["faults"]
    done = [json.loads(file.read_text()) for file in sorted(folder.glob("fault-*"))]
    assert len(done) == len(faults)
    victims = [process for fault in done for process in fault]
    assert len(victims) == sum(len(fault["ranks"]) for fault in faults)
    begun = _reports(folder, "begin")
    assert sorted(begun) == list(range(size + len(victims)))
    return size, begun, victims


def check(folder: Path) -> list[dict[str, Any]]:
    """Check the faults of a job, that the other processes and the replacements have trained to the end, and that all
    have the same result as training without failures. Returns their reports, by rank."""
    size, begun, victims = check_faults(folder)
    ended = _reports(folder, "end")
    assert sorted(ended) == sorted(set(begun) - set(victims))
    assert {each: end["pid"] for each, end in ended.items()} == {
        each: begun[each]["pid"] for each in ended
    }
    by_rank = sorted(ended.values(), key=lambda end: end["rank"])
    assert [end["rank"] for end in by_rank] == list(range(size))
    # Survivors keep the lowest ranks, and replacements follow.
    assert [each["process"] >= size for each in by_rank] == sorted(each >= size for each in ended)
    assert {end["size"] for end in by_rank} == {size}
    assert len({end["step"] for end in by_rank}) == 1
    assert len({end["bits"] for end in by_rank}) == 1
    assert all(end["as_expected"] for end in by_rank)
    return by_rank


def _reports(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    reports = [json.loads(file.read_text()) for file in folder.glob(f"{kind}-*")]
    return {report["process"]: report for report in reports}


# ---- in the processes of the job -------------------------------------------------------------------------------------


class Faults:
    """The faults of this job, as seen by one of its processes."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self._folder = Path(os.environ["TEST_FOLDER"])
        planned = json.loads((self._folder / "faults.json").read_text())
        self.size = planned["size"]
        self._faults = planned["faults"]
        self._at_begin = 0  # how many faults had occurred when the job was formed
        self.process = int(os.environ["HOROPLUG_ELASTIC_PROCESS"])
        self._write("begin")

    def begin(self) -> None:
        """Call this whenever the job has been formed."""
        rank = self._hvd.rank()
        (self._folder / f"rank-{rank}").write_text(f"{self.process} {os.getpid()}")
        self._at_begin = self.number

    @property
    def number(self) -> int:
        """How many faults have occurred."""
        return len(list(self._folder.glob("fault-*")))

    @property
    def are_over(self) -> bool:
        """Whether all faults have occurred and the processes have been replaced."""
        return self.number == len(self._faults) and self._hvd.size() == self.size

    def at(self, moment: str, step: int, rank: int | None = None) -> None:
        """This process is at a moment of a step, and fails if it is the time for it. ``rank``: by default that of the
        framework."""
        number = self.number
        if number == len(self._faults):
            return
        fault = self._faults[number]
        if fault["moment"] != moment or step < fault["step"]:
            return
        if (self._hvd.rank() if rank is None else rank) != fault["ranks"][0]:
            return
        if moment in (*MOMENTS, REDUCTION) and (
            self._hvd.size() < self.size or self._at_begin < number
        ):
            return  # the fault before is not over yet
        others = [
            tuple(map(int, (self._folder / f"rank-{rank}").read_text().split()))
            for rank in fault["ranks"][1:]
        ]
        with contextlib.suppress(FileExistsError), open(self._folder / f"fault-{number}", "x") as f:
            json.dump([self.process, *(process for process, _ in others)], f)
        for _, pid in others:
            os.kill(pid, signal.SIGKILL)
        if fault["how"] == "exception":
            raise ValueError("on purpose")
        if fault["how"] == "exit":
            sys.exit(1)
        if fault["how"] == "memory":
            exhaust_memory()
        os.kill(os.getpid(), getattr(signal, fault["how"]))

    def watch(self, state: Any) -> None:
        """Make the moments in which a state is saved, committed, synchronised and reset moments of failure."""
        save, updates, sync = state.save, state.check_host_updates, state.sync

        def at(moment: str) -> None:
            self.at(moment, state.step)

        state.save = lambda: (at("save"), save())
        state.check_host_updates = lambda: (at("commit"), updates())
        state.sync = lambda: (self.begin(), at("sync"), sync())
        state.register_reset_callbacks([lambda: at("reset")])

    def wait_for_all(self, state: Any) -> None:
        """Wait, by commits, until the processes that have failed have been replaced."""
        deadline = time.monotonic() + scaled(60)
        while self._hvd.size() < self.size:
            assert time.monotonic() < deadline, "no replacement has come"
            time.sleep(0.02)
            state.commit()

    def end(self, step: int, bits: str, as_expected: bool, **further: Any) -> None:
        """Report the result of the training."""
        rank, size = self._hvd.rank(), self._hvd.size()
        self._write(
            "end",
            rank=rank,
            size=size,
            step=step,
            bits=bits,
            as_expected=bool(as_expected),
            **further,
        )

    def _write(self, kind: str, **report: Any) -> None:
        report = {"process": self.process, "pid": os.getpid(), **report}
        (self._folder / f"{kind}-{self.process}").write_text(json.dumps(report))


def train(hvd: Any, faults: Faults, state: Any, step: Any, steps: int = 20) -> None:
    """Call ``step(state)`` at least ``steps`` times, and until all faults are over."""
    faults.watch(state)

    @hvd.elastic.run
    def run(state: Any) -> None:
        taken = 0
        while hvd.broadcast_object(state.step < steps or not faults.are_over, 0):
            step(state)
            state.step += 1
            state.commit()
            taken += 1
            if taken == 3:
                faults.wait_for_all(state)

    run(state)


def run_unedited(program: str) -> None:
    """Run a program, and let processes fail in commits; the steps of the faults are numbers of commits."""
    import horoplug
    from horoplug.common.elastic import State

    faults = Faults(horoplug)
    updates = State.check_host_updates

    def fail_or_check(state: State) -> None:
        faults.begin()
        faults.at("commit", state._commits)
        updates(state)

    State.check_host_updates = fail_or_check  # type: ignore[method-assign]
    sys.argv[:] = [program]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    run_unedited(sys.argv[1])
