"""Objects in an elastic state that stay where they are, and objects that cannot be sent to other ranks."""

import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

import horoplug.torch as hvd
from horoplug.common.elastic import ObjectState
from horoplug.torch.elastic.state import LRSchedulerStateHandler
from tests.harness.support import ranks_fixture

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aab")

GENERATORS = [
    ("Python", lambda seed: random.Random(seed), lambda generator: generator.random()),
    ("NumPy", lambda seed: np.random.default_rng(seed), lambda generator: generator.random()),
    ("former NumPy", lambda seed: np.random.RandomState(seed), lambda each: each.random_sample()),
    (
        "PyTorch",
        lambda seed: torch.Generator().manual_seed(seed),
        lambda generator: torch.rand(1, generator=generator).item(),
    ),
]


def test_generators_stay_where_they_are_and_return_to_the_commit(ranks):
    """All ranks draw the same numbers, with the objects that they have created themselves, in spite of a failure."""

    def check():
        made = {name: make(100 + hvd.rank()) for name, make, _ in GENERATORS}
        draws = {name: draw for name, _, draw in GENERATORS}
        state = hvd.elastic.TorchState(step=0, found=(), **made)
        failed = []

        @hvd.elastic.run
        def train(state):
            while state.step < 4:
                drawn = [draw(made[name]) for name, draw in draws.items()]
                if state.step == 2:
                    hvd.allreduce(torch.ones(1), name="step")
                    if not failed:
                        failed.append(True)
                        raise hvd.HorovodInternalError("a rank has been lost")
                state.found += (tuple(drawn),)
                state.step += 1
                state.commit()
            return state.found

        found = train(state)
        assert all(getattr(state, name) is each for name, each in made.items())
        expected = {name: make(100) for name, make, _ in GENERATORS}
        for row in found:
            assert list(row) == [draw(expected[name]) for name, draw in draws.items()]

    ranks.run(check)


@pytest.mark.parametrize("rollback", [True, False])
def test_gradient_scaler_whose_step_is_interrupted_between_unscale_and_update(ranks, rollback):
    """Ranks begin with different scales. The training has the result of one without failures."""

    def run(*, fails):
        torch.manual_seed(1)
        model = torch.nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
        scale = 512.0 if hvd.rank() == 0 else 4.0
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        state = hvd.elastic.TorchState(model, optimizer, rollback=rollback, scaler=scaler, step=0)
        failed = [] if fails else [True]

        @hvd.elastic.run
        def train(state):
            assert state.scaler is scaler
            while state.step < 5:
                optimizer.zero_grad()
                loss = model(torch.ones(2, 2) * (hvd.rank() + 1)).square().mean()
                scaler.scale(loss).backward()
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                if state.step == 3 and not failed:
                    failed.append(True)
                    raise hvd.HorovodInternalError("a rank has been lost")
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
                state.step += 1
                state.commit()

        train(state)
        return scaler.get_scale(), [p.detach().clone() for p in model.parameters()]

    def check():
        scale, found = run(fails=True)
        assert scale == 512.0 * 4
        expected_scale, expected = run(fails=False)
        assert scale == expected_scale
        assert all(map(torch.equal, found, expected))

    ranks.run(check)


def test_distributed_sampler_keeps_its_epoch_and_takes_the_rank_of_the_job(ranks):
    def check():
        size, rank = hvd.size(), hvd.rank()
        sampler = DistributedSampler(range(10), size + 1, rank, shuffle=True, seed=7)
        state = hvd.elastic.TorchState(sampler=sampler)
        sampler.set_epoch(5 + rank)
        state.save()
        state.on_reset()
        state.sync()
        assert state.sampler is sampler
        expected = DistributedSampler(range(10), size, rank, shuffle=True, seed=7)
        expected.set_epoch(5)
        assert list(sampler) == list(expected)
        sampler.set_epoch(9)
        state.restore()
        assert sampler.epoch == 5

    ranks.run(check)


class _Scheduler(torch.optim.lr_scheduler.StepLR):
    """Has state that cannot be pickled on rank 0 only, as a lock that a thread has created there."""

    def state_dict(self):
        return super().state_dict() | ({"extra": [threading.Lock()]} if hvd.rank() == 0 else {})


def _nested():
    return hvd.elastic.TorchState(step=0, tools={"names": ["a"], "locks": [1, threading.Lock()]})


def _plain():
    return ObjectState(hvd.broadcast_object, hvd.rank, step=0, system=random.SystemRandom())


def _of_a_handler():
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    state = hvd.elastic.TorchState()
    handler = LRSchedulerStateHandler(torch.optim.lr_scheduler.StepLR(optimizer, 3))
    handler.value = _Scheduler(optimizer, 3)  # without a save, which would fail to copy the lock
    state.sync = handler.sync
    return state


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (_nested, "the attribute 'tools'['locks'][1], a lock, "),
        (_plain, "the attribute 'system', a SystemRandom, "),
        (_of_a_handler, "in the state of the '_Scheduler'['extra'][0], a lock, "),
    ],
)
def test_what_cannot_be_pickled_is_one_line_on_all_ranks_and_the_job_goes_on(ranks, make, where):
    def check():
        state = make()
        with pytest.raises(ValueError, match="cannot be sent to new processes") as caught:
            hvd.elastic.run(lambda state: None)(state)
        assert "\n" not in str(caught.value)
        assert where in str(caught.value)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item() == hvd.size()

    ranks.run(check)


def test_object_with_a_state_of_its_own_on_another_rank_only_is_one_line(ranks):
    def check():
        generator = random.Random(1) if hvd.rank() == 0 else None
        state = ObjectState(hvd.broadcast_object, hvd.rank, generator=generator)
        if hvd.rank() == 0:
            state.sync()
            return
        with pytest.raises(ValueError, match="the attribute 'generator' is a NoneType here"):
            state.sync()

    ranks.run(check)
