"""Process sets that a program has added exist again after a reset, on survivors and on new processes."""

import random
import re
import sys

import torch

import horoplug.torch as hvd
from horoplug.common import context
from horoplug.common.added_sets import AddedSets
from horoplug.common.elastic import initialize_again
from horoplug.common.process_sets import ProcessSet
from tests.harness import program_text
from tests.harness.elastic_launcher import PRELUDE, launched
from tests.harness.support import seed

pytest_plugins = ["tests.harness.jobs"]

# Trains 30 steps and as many more as it takes until the job is complete again. Process 1 is killed in step 5.
TRAIN = """
{patch}

hvd.init()
state = ObjectState(broadcast_object, hvd.rank, step=0)
{add}

def total(process_set, name):
    return hvd.allreduce(np.ones(1), op=hvd.Sum, name=name, process_set=process_set)[0]

def train(state):
    {begin}
    say("process", ME, "of", hvd.size(), "ids", hvd.size(), [each.process_set_id for each in sets])
    while state.step < 30 or hvd.size() < {size}:
        if ME == 1 and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        for number, each in enumerate(sets):
            if each.included():
                assert total(each, f"set {{number}}") == each.size()
        hvd.allreduce(np.ones(10), name="gradient")
        state.step += 1
        state.commit()

run_fn(train, initialize_again)(state)
say("done", ME, "rank", hvd.rank(), "of", hvd.size(), [each.process_set_id for each in sets])
"""


def job(add, *, begin="pass", patch="", size=3, **variables):
    text = PRELUDE + TRAIN.format(add=add, begin=begin, patch=patch, size=size)
    code, out, err = launched(
        "-np", size, "--min-np", size - 1, sys.executable, "-c", text, **variables
    )
    print(out, err)
    assert code == 0, err
    return re.findall(r"done (\d+) rank (\d+) of \d (\[.*\])", out), out, err


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_added_sets_exist_again_after_a_failure_and_new_processes_find_them():
    """While the job has two processes, all ranks are in the first set, and the last set is left out."""
    add = """
if os.environ["HOROPLUG_RESTART_COUNT"] == "0":
    hvd.remove_process_set(hvd.add_process_set([0, 1]))
sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [0], [2, 0])]
"""
    done, out, _ = job(add)
    assert sorted(done) == [
        ("0", "0", "[1, 2, 3]"),
        ("2", "1", "[1, 2, 3]"),
        ("3", "2", "[1, 2, 3]"),
    ]
    for process in (0, 2):
        assert f"process {process} of 2 ids 2 [0, 1, None]" in out


def test_training_function_that_adds_its_sets_whenever_it_is_called():
    begin = """global sets; sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [0, 2])]
    try:
        hvd.add_process_set([2, 0])
    except ValueError as error:
        say("refused:", error)"""
    done, out, _ = job("", begin=begin)
    assert sorted(done) == [("0", "0", "[1, 2]"), ("2", "1", "[1, 2]"), ("3", "2", "[1, 2]")]
    assert out.count("refused: process set 2 already has the ranks [0, 2]") == 3 + 3


def test_set_that_only_some_ranks_had_added_is_added_again_by_all():
    """The job fails when rank 0 knows that the set is registered, and rank 2 does not."""
    patch = """
from horoplug.common import process_sets
register = process_sets.register

def fail_once(process_set):
    if process_set.ranks == [0, 2]:
        process_sets.register = register
    register(process_set)
    if ME > 0 and process_set.ranks == [0, 2]:
        if ME == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise hvd.HorovodInternalError("as if the job had failed a moment earlier")

if os.environ["HOROPLUG_RESTART_COUNT"] == "0":
    process_sets.register = fail_once
"""
    begin = "global sets; sets = [hvd.add_process_set(each) for each in ([0], [0, 2])[: hvd.size() - 1]]"
    done, _, _ = job("", begin=begin, patch=patch)
    assert sorted(done) == [("0", "0", "[1, 2]"), ("2", "1", "[1, 2]"), ("3", "2", "[1, 2]")]


def test_process_that_dies_while_the_sets_are_registered_again():
    """Process 2 dies when process 3 has come, which then waits for process 4."""
    patch = """
from horoplug.common.added_sets import AddedSets
agree = AddedSets.agree

def die(self, lists):
    if ME == 2 and hvd.size() == 3 and None in lists and lists[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    agree(self, lists)

AddedSets.agree = die
"""
    done, _, _ = job(
        "sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([0, 2])]", patch=patch
    )
    assert sorted(done) == [("0", "0", "[1, 2]"), ("3", "1", "[1, 2]"), ("4", "2", "[1, 2]")]


def test_set_that_only_a_new_process_adds_is_an_error_that_names_it():
    add = """
sets = [hvd.add_process_set([0, 1])]
if ME == 3:
    try:
        hvd.add_process_set([0, 2])
    except hvd.HorovodInternalError as error:
        say("error:", error)
        raise
"""
    done, out, _ = job(add, HOROPLUG_DEADLOCK_TIME_SECONDS="0.5")
    assert sorted(done) == [("0", "0", "[1]"), ("2", "1", "[1]"), ("4", "2", "[1]")]
    (line,) = re.findall("error: (.*)", out)
    assert re.search(r"rank 2 waits for 'add_process_set\S+' \(not submitted by ranks 0, 1\)", line)


# In each step, the ranks add a set, or remove it if it is there. Some processes are killed after a while.
CHANGE = program_text("tests/elastic/programs/process_sets_change.py")


def test_random_failures_while_sets_are_added_and_removed():
    number = seed()
    draw = random.Random(number)
    victims = {draw.randrange(4), draw.randrange(4), draw.randrange(4, 6)}
    program = [sys.executable, "-c", CHANGE, number, *victims]
    code, out, err = launched("-np", 4, "--min-np", 2, *program)
    assert code == 0, err
    done = re.findall(r"done (\d+) (.*)", out)
    assert not {int(process) for process, _ in done} & victims
    assert [sets for _, sets in done] == [done[0][1]] * 4


def test_job_whose_processes_all_live_keeps_the_sets_in_a_reset_and_not_in_a_shutdown(pool):
    def run():
        first, last = (hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2]))
        hvd.remove_process_set(first)
        initialize_again()
        assert (first.process_set_id, last.process_set_id) == (None, 1)
        again = hvd.add_process_set([1, 2])
        if last.included():
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=last)
            assert hvd.allreduce(total, op=hvd.Sum, process_set=again) == 4
        hvd.barrier()
        context.context.shutdown()  # as a reset does
        assert (last.process_set_id, again.process_set_id) == (None, None)
        hvd.shutdown()
        hvd.init()
        initialize_again()
        assert last.process_set_id is None
        assert hvd.add_process_set([0, 1]).process_set_id == 1  # not a set that was there before

    with pool.ranks(3) as job:
        job.run(run)


# ---- the agreement, without a job ------------------------------------------------------------------------------------


def made(*ranks):
    sets, objects = AddedSets(), [ProcessSet(each) for each in ranks]
    for number, each in enumerate(objects, start=1):
        each.process_set_id = number
        sets.add(each)
    return sets, objects


def test_sets_that_all_survivors_have_are_restored_in_their_order():
    """One had been told that a set was added or removed when the job failed, and another one had not."""
    survivors = [(0, 1), (0, 2), (1, 2)], [(0, 1), (1, 2), (0, 3)]
    for own in (*survivors, None):
        sets, _ = made(*(own or ()))
        sets.agree([survivors[0], None, survivors[1], None])
        assert list(sets) == [(0, 1), (1, 2)]
    sets.agree([None, None])
    assert list(sets) == []


def test_restored_set_is_claimed_once_by_any_object():
    sets, (old, other) = made([0, 1], [1, 2])
    sets.invalidate()
    assert old.process_set_id is None
    sets.agree([[(0, 1)]])
    old.process_set_id = 4
    sets.restore((0, 1), old)
    new, further = ProcessSet([1, 0]), ProcessSet([0, 1])
    assert sets.claim(new)
    assert not sets.claim(further)
    assert not sets.claim(other)
    assert (old.process_set_id, new.process_set_id, further.process_set_id) == (4, 4, None)
    sets.invalidate()
    assert (old.process_set_id, new.process_set_id) == (None, None)


def test_set_that_is_left_out_can_be_claimed_and_removed():
    sets, (known,) = made([0, 9])
    sets.invalidate()
    sets.agree([[(0, 9)]])
    sets.restore((0, 9), known)
    claimed = ProcessSet([0, 9])
    assert sets.claim(claimed)
    assert claimed.process_set_id is None
    assert not sets.drop(ProcessSet([0, 9]))
    assert sets.drop(claimed)
    assert list(sets) == []
