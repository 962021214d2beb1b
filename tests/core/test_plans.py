"""Plans: repeated steps are installed as a plan and need no control messages from then on."""

import time

import numpy as np
import pytest
import torch

import horoplug as hvd
import horoplug.torch as thvd
from horoplug.common.context import context
from tests.harness.checks.errors import internal

pytest_plugins = ["tests.harness.jobs"]


def stats():
    return context.engine().stats()


def train(steps, every=0):
    """Train with an unnamed metric, and an evaluation after every ``every`` steps (0: none). Returns the parameters;
    the time of each step's end, with the negotiated batches and control messages so far; and the counts in the end."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
    thvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = thvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    log = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 20)).square().mean()
        loss.backward()
        optimizer.step()
        thvd.allreduce(loss.detach())
        counts = stats()
        negotiated = counts["batches"] - counts["planned_batches"]
        log.append((time.monotonic(), negotiated, counts["control_messages"]))
        if every and step % every == every - 1:
            with torch.no_grad():
                thvd.allgather(model(torch.randn(hvd.rank() + 1, 20)), name="evaluation")
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return flat.numpy().tobytes(), log, stats()


def expect_no_negotiation(steps):
    """No batch of these steps was negotiated. Every 2.5 s, half of HOROPLUG_DEADLOCK_TIME_SECONDS, ranks may ask each
    other what they wait for, and once more after a wait of that length. For that a rank, of at most three, sends at
    most four messages: rank 0 two questions to two ranks, another rank a request and two answers."""
    ends, negotiated, messages = zip(*steps, strict=True)
    assert len(set(negotiated)) == 1, negotiated
    assert messages[-1] - messages[0] <= 4 * (1 + (ends[-1] - ends[0]) // 2.5), messages


# The autotuner ends a plan after each trial, whose number of steps depends on the times that it measures. Tests of what
# else ends a plan switch it off.
UNTUNED = {"HOROVOD_AUTOTUNE": "0"}


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
@pytest.mark.short("*aa*")
def test_training_needs_no_control_messages(pool, hosts):
    with pool.ranks(len(hosts), hosts=hosts, env=UNTUNED) as job:
        results = job.run(train, 40)
        for parameters, steps, counts in results:
            assert parameters == results[0][0]
            expect_no_negotiation(steps[10:])
            assert counts["planned_batches"] >= 2 * 25
            assert counts["broken_plans"] == 0


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_training_needs_no_control_messages_after_the_trials_of_the_autotuner(
    pool, hosts, tmp_path
):
    log = tmp_path / "trials.csv"
    with pool.ranks(len(hosts), hosts=hosts, env={"HOROVOD_AUTOTUNE_LOG": str(log)}) as job:
        results = job.run(train, 250)
    # Between two ranks on different hosts there is a setting to tune, whose best value may be tried once more.
    trials = sum(line.endswith(",1") for line in log.read_text().splitlines())
    assert trials in ((1, 2) if hosts == "ab" else (0,))
    for parameters, steps, counts in results:
        assert parameters == results[0][0]
        expect_no_negotiation(steps[200:])
        assert counts["broken_plans"] == trials


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_results_do_not_depend_on_plans(pool, hosts):
    """Results have the same bits with a plan that each evaluation pauses, and without plans."""
    with pool.ranks(2, hosts=hosts, env=UNTUNED) as job:
        planned = job.run(train, 60, 25)
        assert all(counts["broken_plans"] == 0 for _, _, counts in planned)
        assert all(counts["planned_batches"] >= 2 * 45 for _, _, counts in planned)
    with pool.ranks(2, hosts=hosts, env={"HOROPLUG_PLAN_AFTER_STEPS": "0"}) as job:
        negotiated = job.run(train, 60, 25)
        assert all(counts["planned_batches"] == 0 for _, _, counts in negotiated)
    assert {parameters for parameters, _, _ in planned + negotiated} == {planned[0][0]}


def train_and_evaluate(shared):
    """Rounds of ten training steps and six evaluation steps, with ``shared`` common tensors. Returns for each round the
    batches, the planned ones, and the number of plans that were broken."""
    training = [f"grad{i}" for i in range(20)]
    evaluation = training[:shared] + [f"metric{i}" for i in range(3)]

    def step(names):
        handles = [
            hvd.allreduce_async(np.full(4, hvd.rank() + 1.0), name=name, op=hvd.Sum)
            for name in names
        ]
        for handle in handles:
            assert (hvd.synchronize(handle) == hvd.size() * (hvd.size() + 1) / 2).all()

    rounds = []
    for _ in range(30):
        before = stats()
        for _ in range(10):
            step(training)
        for _ in range(6):
            step(evaluation)
        after = stats()
        names = ("batches", "planned_batches", "broken_plans")
        rounds.append(tuple(after[name] - before[name] for name in names))
    return rounds


@pytest.mark.parametrize("shared", [0, 2])
def test_alternating_loops_keep_their_plans(pool, shared):
    with pool.ranks(2) as job:
        rounds = list(zip(*job.run(train_and_evaluate, shared), strict=True))
    broken = [sum(number for *_, number in ranks) for ranks in rounds]
    # A rank that gets no processor for some milliseconds ends a plan, in any round, and that plan is made again until
    # the next round. Without that, the loops run by their plans alone. The first two rounds make the plans.
    undisturbed = [rounds[i] for i in range(2, len(rounds)) if broken[i - 1] == broken[i] == 0]
    assert undisturbed
    assert all(ranks == ((16, 16, 0),) * 2 for ranks in undisturbed)


def changing_order(_):
    """The order of blocking operations changes after the plan was installed, differently on each rank."""
    x = np.ones(4)
    for _ in range(30):
        hvd.allreduce(x, name="a")
        hvd.allreduce(x, name="b")
    locked = stats()["planned_batches"]
    names = ["a", "b"] if hvd.rank() == 0 else ["b", "a"]
    for _ in range(30):
        handles = [hvd.allreduce_async(x, name=name) for name in names]
        if hvd.rank() == 1:
            handles.reverse()
        for handle in handles:
            hvd.synchronize(handle)
    # Rank 0 waits for each operation in its own order, which works since the others do not wait.
    for _ in range(30):
        handles = {}
        for name in ["b", "a"]:
            handles[name] = hvd.allreduce_async(x, name=name)
            if hvd.rank() == 0:
                hvd.synchronize(handles[name])
        if hvd.rank() != 0:
            for name in ["a", "b"]:
                hvd.synchronize(handles[name])
    return locked


def test_plan_follows_a_changed_order(pool):
    with pool.ranks(3) as job:
        assert all(locked > 20 for locked in job.run(changing_order, None))


def disagree(_):
    """A shape differs between ranks while a plan is installed."""
    for _ in range(20):
        hvd.allreduce(np.ones(4), name="x")
    assert stats()["planned_batches"] > 0
    hvd.allreduce(np.ones(4 if hvd.rank() == 0 else 5), name="x")


@pytest.mark.short(failure=True)
def test_mismatch_inside_a_plan_names_ranks_and_tensor(pool):
    with pool.ranks(2) as job:
        internal(job.outcomes(disagree, None), "x", "rank 0", "rank 1", "[4]", "[5]")
        job.run(lambda: hvd.allreduce(np.ones(4), name="x"))


def deadlock(_):
    """Ranks wait for each other in operations that all belong to the plan."""
    x = np.ones(4)
    for _ in range(20):
        hvd.allreduce(x, name="a")
        hvd.allreduce(x, name="b")
    for name in ["a", "b"] if hvd.rank() == 0 else ["b", "a"]:
        hvd.allreduce(x, name=name)


def test_deadlock_inside_a_plan_names_ranks_and_tensors(pool):
    with pool.ranks(2, env={"HOROPLUG_DEADLOCK_TIME_SECONDS": "0.5"}) as job:
        internal(job.outcomes(deadlock, None), "'allreduce.a'", "'allreduce.b'")
