"""Elastic training with PyTorch: the sampler, the state, and the loop around a training function."""

import copy
import random
from unittest import mock

import pytest
import torch

import horoplug.torch as hvd
from horoplug.common import elastic
from horoplug.common.elastic import HostUpdateResult, ObjectState, State
from horoplug.torch.elastic import state as torch_state
from tests.harness.support import ranks_fixture

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "ab")


def sampler_of(rank, size, dataset, **options):
    with (
        mock.patch("horoplug.torch.elastic.sampler.rank", return_value=rank),
        mock.patch("horoplug.torch.elastic.sampler.size", return_value=size),
    ):
        sampler = hvd.elastic.ElasticSampler(dataset, **options)
        reset = sampler.reset

        def again():
            with (
                mock.patch("horoplug.torch.elastic.sampler.rank", return_value=rank),
                mock.patch("horoplug.torch.elastic.sampler.size", return_value=size),
            ):
                reset()

        sampler.reset = again
    return sampler


# ---- the sampler: the order is a contract, because resumed jobs rely on it -------------------------------------------


@pytest.mark.parametrize(
    ("size", "length", "expected"),
    [
        (1, 3, [[0, 1, 2]]),
        (2, 4, [[0, 2], [1, 3]]),
        (2, 5, [[0, 2, 4], [1, 3, 0]]),
        (3, 7, [[0, 3, 6], [1, 4, 0], [2, 5, 1]]),
        (4, 1, [[0], [0], [0], [0]]),
        (2, 0, [[], []]),
    ],
)
def test_sampler_order_without_shuffling(size, length, expected):
    for rank in range(size):
        sampler = sampler_of(rank, size, range(length), shuffle=False)
        assert list(sampler) == expected[rank]
        assert len(sampler) == len(expected[rank])


def test_sampler_order_with_shuffling():
    first = [4, 1, 5, 2, 0, 3, 7, 6]  # from random.Random(0)
    samplers = [sampler_of(rank, 2, range(8)) for rank in range(2)]
    assert [list(sampler) for sampler in samplers] == [first[0::2], first[1::2]]
    sampler = sampler_of(0, 1, range(8), seed=3)
    sampler.set_epoch(2)
    for _ in range(2):
        assert list(sampler) == [6, 3, 1, 0, 7, 2, 5, 4]  # from random.Random(5)


def test_sampler_drops_processed_samples():
    expected = list(range(10))
    random.Random(1).shuffle(expected)
    samplers = [sampler_of(rank, 3, range(10), seed=1) for rank in range(3)]
    for sampler in samplers:
        sampler.record_batch(0, 1)
        assert sampler.processed_num == 3
        assert len(sampler) == 4  # only a reset divides the samples again
        sampler.load_state_dict(sampler.state_dict())
    left = expected[3:]
    padded = left + left[:2]
    assert [list(sampler) for sampler in samplers] == [padded[rank::3] for rank in range(3)]
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 3}
    assert sampler.processed_indices == set()
    # The job continues with two ranks.
    samplers = [sampler_of(rank, 2, range(10), seed=1) for rank in range(2)]
    for rank, sampler in enumerate(samplers):
        sampler.load_state_dict({"epoch": 0, "processed_num": 3})
        assert list(sampler) == (left + left[:1])[rank::2]
        sampler.set_epoch(1)
        assert sampler.processed_num == 0
        assert len(sampler) == 5
        # With more than all samples processed, no samples remain.
        sampler.load_state_dict({"epoch": 1, "processed_num": 14})
        assert (list(sampler), len(sampler)) == ([], 0)


@pytest.mark.short
def test_sampler_yields_every_sample_once():
    for size in range(1, 6):
        for length in range(size, 12):
            dealt = [n for rank in range(size) for n in sampler_of(rank, size, range(length))]
            assert set(dealt) == set(range(length))
            assert len(dealt) == -(-length // size) * size


def test_sampler_in_a_data_loader(ranks):
    def check():
        data = torch.arange(8 * hvd.size())
        sampler = hvd.elastic.ElasticSampler(data)
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
        state = hvd.elastic.TorchState(sampler=sampler)
        state.sync()
        seen = []
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            sampler.record_batch(number, len(batch))
            assert sampler.processed_num == 2 * hvd.size() * (number + 1)
            if number == 1:
                break
        state.commit()
        sampler.record_batch(2, 2)
        state.restore()
        assert sampler.processed_num == 4 * hvd.size()
        assert len(sampler) == 4
        for batch in loader:
            seen += batch.tolist()
        assert sorted(n for part in hvd.allgather_object(seen) for n in part) == data.tolist()
        sampler.set_epoch(1)
        assert len(loader) == 4

    ranks.run(check)


# ---- the state -------------------------------------------------------------------------------------------------------


def make(key):
    torch.manual_seed(key)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (key + 1), momentum=0.9)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()


def frozen(*objects):
    return [copy.deepcopy(thing.state_dict()) for thing in objects]


def check_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def check_same_everywhere(*objects):
    mine = frozen(*objects)
    for other in hvd.allgather_object(mine):
        check_same(mine, other)


@pytest.mark.short("aa*")
def test_state_sync_commit_and_restore(ranks):
    def check():
        rank = hvd.rank()
        model, optimizer = make(rank)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        step(model, optimizer)
        schedule.last_epoch = rank
        state = hvd.elastic.TorchState(
            model, optimizer, schedule=schedule, epoch=10 + rank, log=[rank], best={"loss": [rank]}
        )
        assert state.model is model
        assert state.optimizer is optimizer
        assert state.schedule is schedule
        state.sync()
        check_same_everywhere(model, optimizer, schedule)
        assert (state.epoch, state.log, state.best) == (10, [0], {"loss": [0]})

        synced = frozen(model, optimizer, schedule)

        def change():
            step(model, optimizer)
            schedule.step()
            state.epoch += 1
            state.log.append(state.epoch)
            state.best["loss"][0] += 1

        change()
        state.restore()
        check_same(frozen(model, optimizer, schedule), synced)
        assert (state.epoch, state.log, state.best) == (10, [0], {"loss": [0]})

        change()
        state.commit()
        committed = frozen(model, optimizer, schedule)
        for _ in range(2):  # twice, because the restored values must not share memory with the copy
            change()
            change()
            state.restore()
            check_same(frozen(model, optimizer, schedule), committed)
            assert (state.epoch, state.log, state.best) == (11, [0, 11], {"loss": [1]})
        for other in hvd.allgather_object(list(model.parameters())):
            check_same(other, list(model.parameters()))

    ranks.run(check)


def test_assigned_object_becomes_part_of_the_state(ranks):
    def check():
        model, optimizer = make(0)
        other, _ = make(hvd.rank() + 1)
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        state.model = other
        state.sync()
        check_same_everywhere(other)
        before = frozen(other)
        with torch.no_grad():
            other[0].weight.zero_()
        state.restore()
        check_same(frozen(other), before)

    ranks.run(check)


def test_objects_synchronise_their_committed_values(ranks):
    def check():
        state = hvd.elastic.TorchState(number=1)
        state.number = 2
        state.sync()
        assert state.number == 1
        assert (state.model, state.optimizer) == (None, None)

    ranks.run(check)


def test_state_handler_registry():
    class Counter:
        value = 0

    class CounterHandler(torch_state.StateHandler):
        def save(self):
            self.saved = self.value.value

        def restore(self):
            self.value.value = self.saved

        def sync(self):
            self.value.value += 100

    before = torch_state.get_handler_registry()
    torch_state.set_handler_registry([(Counter, CounterHandler), *before])
    try:
        counter = Counter()
        with mock.patch("horoplug.torch.elastic.state.broadcast_object", side_effect=lambda x: x):
            state = hvd.elastic.TorchState(counter=counter)
        state.save()
        counter.value = 3
        state.restore()
        assert counter.value == 0
        state.sync()
        assert counter.value == 100
    finally:
        torch_state.set_handler_registry(before)
    assert isinstance(hvd.elastic.TorchState(counter=Counter()).counter, Counter)


def test_object_state_without_a_framework():
    sent = []
    state = ObjectState(lambda x: sent.append(x) or x, lambda: 0, nested=([1], {2}), thing=object())
    thing = state.thing
    state.nested[0].append(5)
    state.restore()
    assert state.nested == ([1], {2})
    assert state.thing is thing
    state.sync()
    assert sent == [{"nested": ([1], {2}), "thing": thing}]
    state.nested[1].add(6)
    state.restore()
    assert state.nested == ([1], {2})
    nothing = ObjectState(sent.append, lambda: 0)
    nothing.sync()
    assert len(sent) == 1
    for method in "save", "restore", "sync":
        with pytest.raises(NotImplementedError):
            getattr(State(None, None), method)()


def test_optimizer_has_hooks_at_size_1_in_an_elastic_job(pool):
    def check():
        model, optimizer = make(0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        step(model, optimizer)
        return len(optimizer._requires_update)

    for value, hooked in ("1", 4), ("0", 0):
        with pool.ranks(1, env={"HOROVOD_ELASTIC": value}) as ranks:
            assert ranks.run(check) == [hooked]


# ---- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.short("aa*", failure=True)
def test_run_restores_the_last_commit_after_a_failure(ranks):
    """After a mismatch, all ranks fail together, restore the last commit, and finish with the result of an undisturbed
    run."""

    def run(fail):
        rank, size = hvd.rank(), hvd.size()
        model, optimizer = make(rank)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        sampler = hvd.elastic.ElasticSampler(range(6 * size), shuffle=False)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0)
        calls, resets, done = [], [], []
        state.register_reset_callbacks([lambda: resets.append((hvd.rank(), hvd.size()))])
        state.register_reset_callbacks([lambda: resets.append("second")])

        @hvd.elastic.run
        def train(state, extra, *, more):
            assert (extra, more) == (1, 2)
            calls.append(state.batch)
            for index in sampler:
                torch.manual_seed(index)
                step(model, optimizer)
                done.append(index)
                state.batch += 1
                sampler.record_batch(state.batch, 1)
                if fail and state.batch == 4 and len(calls) == 1:
                    if size == 1:  # a single rank has no mismatch
                        raise hvd.HorovodInternalError("made up")
                    hvd.allreduce(torch.ones(2 + rank), name="mismatch")
                if state.batch % 3 == 0:
                    state.commit()
            return "done"

        assert train.__name__ == "train"
        assert train(state, 1, more=2) == "done"
        assert state.batch == 6
        own = list(range(rank, 6 * size, size))
        if fail:
            assert calls == [0, 3]
            assert resets == [(rank, size), "second"]
            assert done == own[:4] + own[3:]
        else:
            assert (calls, resets, done) == ([0], [], own)
        assert state not in elastic.notification_manager._listeners
        return list(model.parameters())

    def check():
        found = run(fail=True)
        check_same(found, run(fail=False))
        for other in hvd.allgather_object(found):
            check_same(other, found)

    ranks.run(check)


def test_run_stops_when_every_attempt_fails(ranks):
    def check():
        calls = []

        @hvd.elastic.run
        def train(state):
            calls.append(1)
            raise hvd.HorovodInternalError("again")

        @hvd.elastic.run
        def slow(state):
            state.number += 1
            state.commit()
            if state.number < 15:
                raise hvd.HorovodInternalError("now and then")
            return state.number

        with mock.patch.object(elastic, "FAILURES_WITHOUT_COMMIT", 3):
            with pytest.raises(hvd.HorovodInternalError, match="again"):
                train(hvd.elastic.TorchState())
            assert len(calls) == 3
            assert slow(hvd.elastic.TorchState(number=0)) == 15
        with pytest.raises(KeyError):
            hvd.elastic.run(lambda state: {}[0])(hvd.elastic.TorchState())

    ranks.run(check)


@pytest.mark.parametrize(
    ("changes", "skip_sync"),
    [
        ([HostUpdateResult.added], False),
        ([HostUpdateResult.removed], True),
        ([HostUpdateResult.removed, HostUpdateResult.added], False),
    ],
)
def test_host_updates_interrupt_all_ranks_at_one_commit(ranks, changes, skip_sync):
    """All ranks are interrupted at the same commit, although only rank 0 was notified, and keep their current state."""

    def check():
        model, optimizer = make(hvd.rank())
        state = hvd.elastic.TorchState(model, optimizer, batch=0)
        log = []
        state.register_reset_callbacks([lambda: log.append("reset")])
        sync = state.sync
        state.sync = lambda: (log.append("sync"), sync())

        @hvd.elastic.run
        def train(state):
            log.append(state.batch)
            while state.batch < 4:
                state.batch += 1
                if state.batch == 2 and hvd.rank() == 0:
                    for time, change in enumerate(changes, start=1):
                        elastic.notification_manager.handle_hosts_updated(time, change)
                state.commit()
            log.append(state.batch)

        train(state)
        return log

    expected = ["sync", 0, "reset", *([] if skip_sync else ["sync"]), 2, 4]
    for log in ranks.run(check):
        assert log == expected


def test_all_ranks_synchronise_if_a_failure_has_kept_one_from_the_interrupt(ranks):
    """Hosts have only left, so that ranks with the state of the commit need not synchronise. One fails in that."""

    def check():
        state = hvd.elastic.TorchState(batch=0)
        log = []
        sync, updates = state.sync, state.check_host_updates
        state.sync = lambda: (log.append("sync"), sync())

        def check_or_fail():
            try:
                updates()
            except hvd.HostsUpdatedInterrupt:
                if hvd.rank() == hvd.size() - 1:
                    raise hvd.HorovodInternalError("the link has failed") from None
                raise

        state.check_host_updates = check_or_fail

        @hvd.elastic.run
        def train(state):
            log.append(state.batch)
            while state.batch < 4:
                state.batch += 1
                if log.count("sync") == 1 and state.batch == 2 and hvd.rank() == 0:
                    elastic.notification_manager.handle_hosts_updated(1, HostUpdateResult.removed)
                state.commit()

        train(state)
        return log

    for log in ranks.run(check):
        assert log == ["sync", 0, "sync", 2]


def test_repeated_host_update_counts_once():
    state = ObjectState(lambda x: x, lambda: 0, n=1)
    state.on_hosts_updated(5, HostUpdateResult.added)
    state.on_hosts_updated(4, HostUpdateResult.removed)
    with pytest.raises(hvd.HostsUpdatedInterrupt) as caught:
        state.commit()
    assert not caught.value.skip_sync
    state.on_hosts_updated(5, HostUpdateResult.added)
    state.commit()
    state.on_hosts_updated(6, HostUpdateResult.removed)
    with pytest.raises(hvd.HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync
    state.on_hosts_updated(7, HostUpdateResult.added)
    state.on_reset()  # earlier notifications are dropped
    state.commit()
