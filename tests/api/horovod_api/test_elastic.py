"""hvd.elastic: state, sampler and run, in a job whose hosts do not change."""

import random

import horovod.torch as hvd
import pytest
import torch

from tests.api.horovod_api.matrix import equal

BATCH = 2
PER_WORKER = 8


def linear(weight, bias):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.load_state_dict({"0.weight": torch.tensor(weight), "0.bias": torch.tensor(bias)})
    return model


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check_weights(model, expected):
    for name, tensor in model.state_dict().items():
        equal(tensor, expected[name])


def test_torch_state_commit_restore_and_sync():
    value = 1.0 if hvd.rank() == 0 else 2.0
    model = linear([[value, value], [value, value]], [value, value])
    other = weights(linear([[1.0, 2.0], [3.0, 4.0]], [0.0, 0.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * (1 + hvd.rank()))
    state = hvd.elastic.TorchState(model, optimizer, batch=20 + hvd.rank(), epoch=10 + hvd.rank())
    state.sync()
    roots = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    check_weights(state.model, roots)
    assert state.model is model
    assert state.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    assert (state.batch, state.epoch) == (20, 10)

    model.load_state_dict(other)
    optimizer.param_groups[0]["lr"] = 5.0
    state.batch, state.epoch = 21, 11
    state.restore()
    check_weights(model, roots)
    assert (state.batch, state.epoch) == (20, 10)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)

    model.load_state_dict(other)
    state.batch, state.epoch = 21, 11
    state.commit()
    model.load_state_dict(roots)
    state.batch, state.epoch = 99, 99
    state.restore()
    check_weights(model, other)
    assert (state.batch, state.epoch) == (21, 11)


def test_object_state_commit_restore_and_sync():
    state = hvd.elastic.TorchState(numbers=[hvd.rank()], text=f"rank {hvd.rank()}")
    state.sync()
    assert (state.numbers, state.text) == ([0], "rank 0")
    state.numbers.append(1)
    state.restore()
    assert state.numbers == [0]


def test_reset_callbacks_are_called():
    called = []
    state = hvd.elastic.TorchState(epoch=0)
    state.register_reset_callbacks([lambda: called.append("a"), lambda: called.append("b")])
    state.on_reset()
    assert called == ["a", "b"]


def test_elastic_run_returns_the_result():
    """``run`` calls the function with the synchronised state and returns its result."""

    @hvd.elastic.run
    def train(state, extra):
        while state.epoch < 3:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="step") == hvd.size()
            state.epoch += 1
            state.commit()
        return state.epoch, extra

    state = hvd.elastic.TorchState(epoch=1 if hvd.rank() == 0 else 7)
    assert train(state, "extra") == (3, "extra")


def test_elastic_run_restores_after_an_internal_error():
    """``run`` restores the last commit, initialises the job again, and calls the function again."""
    seen = []

    @hvd.elastic.run
    def train(state):
        seen.append(state.epoch)
        if len(seen) == 1:
            state.epoch = 5
            state.commit()
            state.epoch = 6
            raise hvd.HorovodInternalError("as if a rank had died")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="step") == hvd.size()
        return state.epoch

    resets = []
    state = hvd.elastic.TorchState(epoch=0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    assert train(state) == 5
    assert seen == [0, 5]
    assert resets == [hvd.size()]


# ---- the sampler ----------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __getitem__(self, index):
        return index

    def __len__(self):
        return self.count


def order(count, epoch, processed=0):
    """Horovod's order, since a resumed job must continue with the same samples."""
    indices = list(range(count))
    random.Random(epoch).shuffle(indices)
    return indices[processed:]


def test_elastic_sampler_divides_remaining_samples():
    size, rank = hvd.size(), hvd.rank()
    count = PER_WORKER * size
    sampler = hvd.elastic.ElasticSampler(Numbers(count), shuffle=True)
    loader = torch.utils.data.DataLoader(Numbers(count), batch_size=BATCH, sampler=sampler)
    state = hvd.elastic.TorchState(sampler=sampler)
    state.sync()
    assert (state.sampler.epoch, state.sampler.processed_num) == (0, 0)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(sampler) == order(count, epoch)[rank::size]
        batches = 0
        for number, _ in enumerate(loader):
            sampler.record_batch(number, BATCH)
            batches += 1
            assert sampler.processed_num == BATCH * size * batches
        assert batches == PER_WORKER // BATCH

    # Without set_epoch the loader goes over the same samples again.
    assert sum(1 for _ in loader) == PER_WORKER // BATCH

    sampler.set_epoch(2)
    assert sampler.processed_num == 0
    sampler.record_batch(0, BATCH)
    sampler.record_batch(1, BATCH)
    state.commit()
    sampler.record_batch(2, BATCH)
    sampler.record_batch(3, BATCH)
    assert sampler.processed_num == 4 * BATCH * size
    state.restore()
    assert sampler.processed_num == 2 * BATCH * size

    sampler.record_batch(2, BATCH)
    state.commit()
    state.sync()
    assert sampler.processed_num == 3 * BATCH * size
    # The remaining samples are divided again.
    assert len(sampler) == BATCH
    assert list(sampler) == order(count, 2, 3 * BATCH * size)[rank::size]
    assert sum(1 for _ in loader) == 1

    sampler.set_epoch(3)
    assert len(sampler) == PER_WORKER


def test_elastic_sampler_pads_with_the_first_samples():
    """Every rank gets the same number of samples, because the first ones are repeated."""
    size, rank = hvd.size(), hvd.rank()
    count = 4 * size + 1
    sampler = hvd.elastic.ElasticSampler(Numbers(count), shuffle=False)
    everything = list(range(count))
    everything += everything[: 5 * size - count]
    assert list(sampler) == everything[rank::size]
    assert len(sampler) == 5


def test_elastic_sampler_state():
    sampler = hvd.elastic.ElasticSampler(Numbers(100), seed=7)
    sampler.set_epoch(3)
    sampler.record_batch(0, 5)
    saved = sampler.state_dict()
    assert saved == {"epoch": 3, "processed_num": 5 * hvd.size()}
    other = hvd.elastic.ElasticSampler(Numbers(100), seed=7)
    other.load_state_dict(saved)
    sampler.reset()
    assert list(other) == list(sampler)
    assert (other.epoch, other.processed_num) == (3, 5 * hvd.size())
