"""hvd.SyncBatchNorm: statistics of the whole batch. Horovod supports GPUs only, horoplug also CPUs."""

import horovod.torch as hvd
import pytest
import torch


def batches(positions):
    """The batches of all ranks, stacked: (ranks, channels, positions)."""
    rows = [[[r * k + i for i in range(positions)] for k in range(1, 5)] for r in range(hvd.size())]
    return torch.tensor(rows, dtype=torch.float32)


def check_same(sync, plain):
    torch.testing.assert_close(sync.running_mean, plain.running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sync.running_var, plain.running_var, rtol=1e-6, atol=1e-6)
    assert sync.num_batches_tracked == plain.num_batches_tracked


@pytest.mark.parametrize("positions", [1, 2, 5])
def test_sync_batch_norm_equals_batch_norm_on_the_whole_batch(positions):
    every = batches(positions)
    sync, plain = hvd.SyncBatchNorm(num_features=4), torch.nn.BatchNorm1d(num_features=4)
    mine, all_of_them = every.clone().requires_grad_(), every.clone().requires_grad_()
    for _ in range(3):
        output = sync(mine[hvd.rank()].unsqueeze(0))
        expected = plain(all_of_them)
        torch.testing.assert_close(output, expected[hvd.rank()].unsqueeze(0), rtol=1e-5, atol=1e-6)
        check_same(sync, plain)
    output.sum().backward()
    expected.mean(dim=0).sum().backward()
    for name, actual, wanted in [
        ("weight", sync.weight.grad, plain.weight.grad),
        ("bias", sync.bias.grad, plain.bias.grad),
        ("input", mine.grad, all_of_them.grad),
    ]:
        average = hvd.allreduce(actual, name=name)
        torch.testing.assert_close(average, wanted, rtol=1e-5, atol=1e-5)


def test_sync_batch_norm_gradient_of_the_input():
    """The loss is one whose gradient is not zero."""
    torch.manual_seed(1)
    every = torch.randn(hvd.size(), 3, 4, 5)
    weights = torch.randn(hvd.size(), 3, 4, 5)
    sync, plain = hvd.SyncBatchNorm(4), torch.nn.BatchNorm2d(4)
    mine = every[hvd.rank()].clone().unsqueeze(-1).requires_grad_()
    all_of_them = every.reshape(-1, 4, 5, 1).clone().requires_grad_()
    (sync(mine) * weights[hvd.rank()].unsqueeze(-1)).sum().backward()
    (plain(all_of_them) * weights.reshape(-1, 4, 5, 1)).sum().backward()
    expected = all_of_them.grad.reshape(hvd.size(), 3, 4, 5, 1)[hvd.rank()]
    torch.testing.assert_close(mine.grad, expected, rtol=1e-4, atol=1e-5)


def test_sync_batch_norm_with_batches_of_different_sizes():
    torch.manual_seed(2)
    parts = [torch.randn(rank + 1, 4) for rank in range(hvd.size())]
    sync, plain = hvd.SyncBatchNorm(4), torch.nn.BatchNorm1d(4)
    output = sync(parts[hvd.rank()])
    expected = plain(torch.cat(parts)).split([len(part) for part in parts])[hvd.rank()]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    check_same(sync, plain)


def test_sync_batch_norm_in_eval_mode_does_not_communicate():
    """A layer with tracked statistics does not communicate in eval mode."""
    sync = hvd.SyncBatchNorm(4).eval()
    if hvd.rank() == 0:
        torch.testing.assert_close(sync(torch.ones(2, 4)), torch.ones(2, 4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}]
)
def test_sync_batch_norm_options(options):
    torch.manual_seed(3)
    every = torch.randn(hvd.size(), 6, 4)
    sync, plain = hvd.SyncBatchNorm(4, **options), torch.nn.BatchNorm1d(4, **options)
    for training in (True, False):
        sync.train(training)
        plain.train(training)
        output = sync(every[hvd.rank()])
        expected = plain(every.reshape(-1, 4)).reshape(every.shape)[hvd.rank()]
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_sync_batch_norm_refuses_one_dimensional_input():
    with pytest.raises(ValueError, match="2D"):
        hvd.SyncBatchNorm(4)(torch.ones(4))


def test_sync_batch_norm_is_a_batch_norm_module():
    sync = hvd.SyncBatchNorm(4, eps=1e-3, momentum=0.2)
    assert isinstance(sync, torch.nn.modules.batchnorm._BatchNorm)
    assert (sync.num_features, sync.eps, sync.momentum) == (4, 1e-3, 0.2)
    assert set(sync.state_dict()) == set(torch.nn.BatchNorm1d(4).state_dict())


def test_two_sync_batch_norm_layers():
    torch.manual_seed(4)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 4), hvd.SyncBatchNorm(4)
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model(torch.randn(5, 3)).square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
