"""One job whose ranks use different frameworks: operations match by name."""

import numpy as np
import pytest

from tests.harness.support import ranks_fixture, seed

pytest.importorskip("tensorflow")

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aaaa", "aabb")


def framework(rank):
    """horoplug's module for the framework of a rank, and the conversions from an array to a tensor and back."""
    if rank % 2 == 0:
        import torch

        import horoplug.torch as hvd

        return hvd, torch.from_numpy, lambda tensor: tensor.numpy()
    import tensorflow as tf

    import horoplug.tensorflow as hvd

    return hvd, tf.constant, lambda tensor: tensor.numpy()


def check_operations(number):
    import horoplug

    rank, size = horoplug.rank(), horoplug.size()
    hvd, tensor, array = framework(rank)
    numbers = np.random.default_rng(number)
    everyones = [numbers.integers(0, 10, (8, 3)).astype(np.float32) for _ in range(size)]
    own = tensor(everyones[rank])
    total = sum(everyones)

    assert np.array_equal(array(hvd.allreduce(own, op=hvd.Sum, name="sum")), total)
    assert np.allclose(array(hvd.allreduce(own, name="mean")), total / size)
    assert np.array_equal(
        array(hvd.allgather(own[: rank + 1], name="rows")),
        np.concatenate([everyones[r][: r + 1] for r in range(size)]),
    )
    for root in range(size):
        assert np.array_equal(array(hvd.broadcast(own, root, name=f"from{root}")), everyones[root])
    parts = np.concatenate([x[2 * rank : 2 * rank + 2] for x in everyones])
    assert np.array_equal(array(hvd.alltoall(own, name="parts")), parts)
    share = array(hvd.reducescatter(own, op=hvd.Sum, name="share"))
    assert np.array_equal(share, total[2 * rank : 2 * rank + 2])
    group = [tensor(everyones[rank] * factor) for factor in range(3)]
    for factor, result in enumerate(hvd.grouped_allreduce(group, op=hvd.Sum, name="group")):
        assert np.array_equal(array(result), total * factor)
    assert hvd.broadcast_object({"of": "TensorFlow"} if rank == 1 else None, 1) == {
        "of": "TensorFlow"
    }
    assert hvd.allgather_object(hvd.__name__) == [
        "horoplug.torch" if r % 2 == 0 else "horoplug.tensorflow" for r in range(size)
    ]
    last = hvd.join()
    return int(last)


@pytest.mark.short
def test_operations_between_torch_and_tensorflow_ranks(ranks):
    assert len(set(ranks.run(check_operations, seed()))) == 1


def check_training():
    """The same model in both frameworks, with each framework's own optimizer and compiler."""
    import horoplug

    rank = horoplug.rank()
    hvd, _, _ = framework(rank)
    x = np.random.default_rng(rank).random((4, 3)).astype(np.float32)
    start = np.full((3, 1), rank, np.float32)
    if rank % 2 == 0:
        import torch

        weight = torch.nn.Parameter(torch.from_numpy(start))
        hvd.broadcast_parameters([("weight", weight)], root_rank=1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), named_parameters=[("weight", weight)]
        )
        for _ in range(20):
            optimizer.zero_grad()
            (torch.from_numpy(x) @ weight - 1).square().mean().backward()
            optimizer.step()
        return weight.detach().numpy()
    import tensorflow as tf

    weight = tf.Variable(start)
    weight.assign(hvd.broadcast(weight, 1, name="weight"))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight - 1))
        gradient = hvd.allreduce(tape.gradient(loss, weight), name="weight")
        weight.assign_sub(0.1 * gradient)

    for _ in range(20):
        step()
    return weight.numpy()


def test_training_on_torch_and_tensorflow_ranks(ranks):
    weights = ranks.run(check_training)
    for weight in weights[1:]:
        assert np.allclose(weight, weights[0], rtol=1e-5)
    assert not np.allclose(weights[0], 1.0)


def check_disagreement():
    import horoplug

    rank = horoplug.rank()
    hvd, tensor, _ = framework(rank)
    kind = np.float32 if rank % 2 == 0 else np.float64
    with pytest.raises(Exception, match=r"float64.*\n*.*float32|float32.*\n*.*float64") as error:
        hvd.allreduce(tensor(np.ones(3, kind)), name="differs")
    assert "rank" in str(error.value)
    return type(error.value).__name__


@pytest.mark.short(failure=True)
def test_mismatch_between_frameworks_is_reported_to_each_rank(ranks):
    """Each rank raises the exception of its framework."""
    assert ranks.run(check_disagreement) == ["HorovodInternalError", "FailedPreconditionError"] * 2
