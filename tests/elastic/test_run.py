"""``horoplug.run`` in elastic jobs: the results are those of the last membership, whatever has failed before."""

import io
import os
import random
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import pytest

from horoplug import RankError, run
from tests.harness.leftovers import nothing_is_left as nothing_is_left
from tests.harness.support import seed

# The ranks cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("nothing_is_left")
STEPS = 6
LIMIT = 90.0  # seconds in which a job has the number of processes that a test wants


def process():
    return int(os.environ["HOROPLUG_ELASTIC_PROCESS"])


def is_first_attempt():
    return os.environ["HOROPLUG_RESTART_COUNT"] == "0"


def train(each_step, size, kind=list):
    """Train for a few steps, and longer until there are ``size`` processes. ``each_step``: called with the number of
    steps; a result other than None ends the function. Returns (rank, size, process, sum), or ``kind`` of it."""
    import numpy as np

    import horoplug as hvd
    from horoplug.common.elastic import ObjectState, initialize_again, run_fn
    from horoplug.common.objects import broadcast_object

    hvd.init()
    deadline = time.monotonic() + LIMIT

    def steps(state):
        while state.step < STEPS or hvd.size() != size:
            assert time.monotonic() < deadline
            (mean,) = hvd.allreduce(np.array([float(state.step)]), name="step")
            state.total += float(mean)
            state.step += 1
            if (early := each_step(state.step)) is not None:
                return early
            state.commit()
        return kind((hvd.rank(), hvd.size(), process(), state.total / state.step))

    state = ObjectState(broadcast_object, hvd.rank, step=0, total=0.0)
    return run_fn(steps, initialize_again)(state)


def check(found, size, without=()):
    """Check the results of :func:`train`. ``without``: processes that are not in the last membership."""
    assert [row[:2] for row in found] == [[rank, size] for rank in range(size)]
    members = [row[2] for row in found]
    assert len(set(members)) == size
    assert not set(members) & set(without)
    assert len({row[3] for row in found}) == 1


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.short
def test_results_by_rank():
    found = run(train, (lambda step: None, 2), min_num_proc=2, max_num_proc=2)
    check(found, 2)


def test_functions_without_a_membership():
    """They do not call init(). The results have the order of the processes."""
    assert run(process, num_proc=3, min_num_proc=2) == [0, 1, 2]
    with pytest.raises(RankError, match="ended before their function returned") as caught:
        run(lambda: os._exit(0), min_num_proc=2)
    assert caught.value.rank is None


def test_former_names_of_arguments():
    with pytest.warns(DeprecationWarning, match=r"is called m\w+_num_proc now") as caught:
        assert run(process, min_np=1, max_np=2) == [0, 1]
    assert [str(each.message) for each in caught] == [
        "min_np is called min_num_proc now",
        "max_np is called max_num_proc now",
    ]
    assert {each.filename for each in caught} == {__file__}


@pytest.mark.parametrize("least", [2, 3])
@pytest.mark.short(failure=True)
def test_killed_process_is_replaced(least):
    """With ``least=2``, the job goes on with two processes meanwhile."""
    draw = random.Random(seed())
    victim, last = draw.randrange(3), draw.randrange(1, STEPS)
    print(f"process {victim} is killed in step {last}")

    def die(step):
        if process() == victim and is_first_attempt() and step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    found = run(train, (die, 3), num_proc=3, min_num_proc=least)
    check(found, 3, without=[victim])
    assert max(row[2] for row in found) == 3


class Fatal:
    """Kills the process that pickles it."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_process_that_is_killed_while_it_returns_a_result():
    """A part of its result has been stored. The result of its replacement is large, too."""

    def die(step):
        if process() == 1 and is_first_attempt() and step == 2:
            return [os.urandom(5_000_000), Fatal()]
        return None

    def large(row):
        return [*row, bytes([row[2]]) * 5_000_001]

    found = run(train, (die, 2, large), num_proc=2, min_num_proc=2)
    check(found, 2, without=[1])
    assert all(row[4] == bytes([row[2]]) * 5_000_001 for row in found)


def test_process_that_raises_an_exception_once_is_replaced(monkeypatch):
    """Its traceback is printed, since the job goes on."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)

    def fail(step):
        if process() == 1 and is_first_attempt() and step == 3:
            raise LookupError("only once")

    check(run(train, (fail, 2), num_proc=2, min_num_proc=2), 2, without=[1])
    assert '<stderr>:    raise LookupError("only once")\n' in errors.getvalue()
    assert "<stderr>:LookupError: only once\n" in errors.getvalue()


def test_process_whose_slot_goes_away(tmp_path, monkeypatch):
    """The last membership is smaller. The process that left it ends without an error."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    hosts, script = tmp_path / "hosts", tmp_path / "discover"
    hosts.write_text("localhost\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)

    def shrink(step):
        if step == 3:
            changed = Path(f"{hosts}.{process()}")
            changed.write_text("localhost:1\n")
            changed.replace(hosts)

    found = run(
        train,
        (shrink, 1),
        min_num_proc=1,
        host_discovery_script=str(script),
        slots=2,
        cooldown_range=(1, 2),
    )
    check(found, 1)
    assert "Traceback" not in errors.getvalue()
    assert "exited with code" not in errors.getvalue()


# ---- failures --------------------------------------------------------------------------------------------------------


def test_function_that_always_fails_on_one_rank():
    """The error is that of the last membership."""

    def fail(step):
        import horoplug as hvd

        if hvd.rank() == 1:
            raise ValueError(f"process {process()} fails")

    with pytest.raises(RankError) as caught:
        run(train, (fail, 2), num_proc=2, min_num_proc=2, reset_limit=2)
    error = caught.value
    assert error.rank == 1
    assert type(error.__cause__) is ValueError
    (number,) = (word for word in str(error.__cause__).split() if word.isdigit())
    assert int(number) >= 3
    first, second = str(error).splitlines()[:2]
    assert first == f"rank 1: ValueError: process {number} fails"
    assert second.startswith("The job has ended: the job was formed again 2 times (reset_limit); ")
    assert f"process {number} (rank 1) on localhost exited with code 1" in second
    assert 'raise ValueError(f"process {process()} fails")' in error.traceback
    assert "run_task.py" not in error.traceback


def test_function_that_always_fails_before_init():
    def fail():
        raise ValueError("too early")

    with pytest.raises(
        RankError, match=r"process \d+: ValueError: too early\nThe job has"
    ) as caught:
        run(fail, num_proc=2, min_num_proc=1)
    assert caught.value.rank is None
    assert type(caught.value.__cause__) is ValueError
    assert 'raise ValueError("too early")' in caught.value.traceback


def test_processes_that_are_always_killed():
    def die(step):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match=r"process \d+ \(rank [01]\) on .*SIGKILL") as caught:
        run(train, (die, 2), num_proc=2, min_num_proc=2, reset_limit=1)
    assert caught.value.rank in (0, 1)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda: os._exit(0), "rank 1 ended before its function returned"),
        (sys.exit, r"rank 1: the function called sys.exit\(\)"),
    ],
)
def test_member_that_exits_before_its_function_returns(how, message):
    def leave(step):
        import horoplug as hvd

        if step == STEPS:
            if hvd.rank() == 1:
                how()
            return "early"
        return None

    with pytest.raises(RankError, match=message) as caught:
        run(train, (leave, 2), num_proc=2, min_num_proc=2)
    assert caught.value.rank == 1
