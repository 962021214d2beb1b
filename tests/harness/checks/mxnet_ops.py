"""Operations, optimizers and states of MXNet, checked on each rank. Its processes are those of .venv-mxnet."""

import os
import random
import signal

import mxnet as mx
import numpy as np

import horoplug.mxnet as hvd
from horoplug.common import stubs
from tests.harness.checks.errors import refused

DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64")


def array(values, dtype=None):
    values = np.asarray(values)
    return mx.nd.array(values, dtype=dtype or values.dtype)


def of_rank(rank, key, shape, dtype):
    draws = np.random.default_rng([key, rank])
    return draws.integers(0, 5, shape).astype(dtype)


def same(got, wanted, dtype=None):
    assert isinstance(got, mx.nd.NDArray), type(got)
    assert got.shape == np.shape(wanted), (got.shape, np.shape(wanted))
    if dtype is not None:
        assert np.dtype(got.dtype) == dtype, got.dtype
    np.testing.assert_allclose(
        got.asnumpy().astype(np.float64), np.asarray(wanted, np.float64), rtol=1e-5
    )


def check_operations(dtype, key):
    rank, size = hvd.rank(), hvd.size()
    shape = (size * 2, 3)
    everyone = [of_rank(r, key, shape, dtype) for r in range(size)]
    total = np.sum(everyone, axis=0, dtype=dtype)
    mine = array(everyone[rank])
    same(hvd.allreduce(mine, op=hvd.Sum), total, dtype)
    same(mine, everyone[rank])  # has not been changed
    same(hvd.allreduce(mine, op=hvd.Max), np.max(everyone, axis=0), dtype)
    same(
        hvd.allgather(mine[: rank + 1]),
        np.concatenate([e[: r + 1] for r, e in enumerate(everyone)]),
        dtype,
    )
    same(hvd.broadcast(mine, size - 1), everyone[-1], dtype)
    rows = slice(2 * rank, 2 * rank + 2)
    same(hvd.alltoall(mine), np.concatenate([e[rows] for e in everyone]), dtype)
    output, received = hvd.alltoall(mine, splits=array([2] * size, np.int32))
    same(output, np.concatenate([e[rows] for e in everyone]), dtype)
    same(received, [2] * size, np.int32)
    same(hvd.reducescatter(mine, op=hvd.Sum), total[rows], dtype)
    for output in hvd.grouped_allreduce([mine, mine * 2], op=hvd.Sum):
        assert np.dtype(output.dtype) == dtype
    same(hvd.grouped_allgather([mine, mine])[1], np.concatenate(everyone), dtype)
    same(hvd.grouped_reducescatter([mine, mine], op=hvd.Sum)[1], total[rows], dtype)
    handle = hvd.allreduce_async(mine, op=hvd.Sum)
    same(hvd.synchronize(handle), total, dtype)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    same(mine, total, dtype)
    group = [array(everyone[rank]), array(everyone[rank]).astype("float32")]
    hvd.grouped_allreduce_(group, op=hvd.Sum)
    same(group[0], total, dtype)
    same(group[1], total, np.float32)
    mine = array(everyone[rank])
    hvd.broadcast_(mine, 0)
    same(mine, everyone[0], dtype)


def check_rooted_and_point_to_point(dtype, key):
    rank, size = hvd.rank(), hvd.size()
    root, after, before = size - 1, (rank + 1) % size, (rank - 1) % size
    everyone = [of_rank(r, key, (size, 3), dtype) for r in range(size)]
    mine = array(everyone[rank])
    total = np.sum(everyone, axis=0, dtype=dtype)
    same(hvd.reduce(mine, root, op=hvd.Sum), total if rank == root else everyone[rank], dtype)
    rows = np.concatenate(everyone) if rank == root else np.empty((0, 3))
    same(hvd.gather(mine, root), rows, dtype)
    same(hvd.scatter(mine, root), everyone[root][rank : rank + 1], dtype)
    handle = hvd.send_async(mine, after, tag=3)
    data = mx.nd.zeros((size, 3), dtype=dtype)
    assert hvd.recv(data, before, tag=3) is data
    same(data, everyone[before], dtype)
    assert hvd.synchronize(handle) is None


def check_horovods_arguments():
    """Their order is that of Horovod's functions for MXNet."""
    rank, size = hvd.rank(), hvd.size()
    x = array([float(rank + 1)])
    total = size * (size + 1) / 2
    # average, name, priority, prescale_factor, postscale_factor, process_set, op
    same(
        hvd.allreduce(x, None, "by position", -3, 2.0, 3.0, hvd.global_process_set, hvd.Sum),
        [6 * total],
    )
    same(hvd.allreduce(x, average=True, priority=1), [total / size])
    same(hvd.allreduce(x, False), [total])
    same(hvd.allgather(x, "gathered", 5), np.arange(size) + 1)
    same(hvd.broadcast(x, 0, "sent", 5, hvd.global_process_set), [1])
    same(hvd.alltoall(array(np.arange(size)), None, "exchanged", 5), [rank] * size)
    # op, name, priority, process_set, prescale_factor, postscale_factor
    y = array(np.ones(size, np.float32))
    same(
        hvd.reducescatter(y, hvd.Sum, "scattered", 5, hvd.global_process_set, 2.0, 3.0), [6 * size]
    )
    refused(TypeError, "colour", lambda: hvd.allreduce(x, colour=1))


def check_shapes_and_classes():
    rank, size = hvd.rank(), hvd.size()
    rows = 0 if rank == 0 else 2
    with mx.util.np_shape(True):
        some = mx.nd.ones((rows, 3)) if rows else mx.nd.empty((0, 3))
    assert hvd.allgather(some).shape == (2 * (size - 1), 3)
    same(hvd.allreduce(array(5.0).reshape(1), op=hvd.Sum), [5 * size])
    view = array(np.arange(12.0, dtype=np.float32).reshape(4, 3))
    hvd.allreduce_(view[1:3], op=hvd.Sum)
    same(view, np.arange(12).reshape(4, 3) * np.array([[1], [size], [size], [1]]))
    same(hvd.allreduce(view.T, op=hvd.Average), view.asnumpy().T)
    big = hvd.allreduce(mx.nd.ones((1_000_000,)), op=hvd.Sum)
    same(big[:10], [size] * 10)
    numpys = hvd.allreduce(mx.np.ones((2, 2)), op=hvd.Sum)
    assert isinstance(numpys, mx.np.ndarray)
    assert numpys.tolist() == [[size, size], [size, size]]


def check_order_with_the_engine(key):
    """MXNet computes in threads of its own: operations use what was computed before, and what follows uses their
    results."""
    rank, size = hvd.rank(), hvd.size()
    for _ in range(20):
        x = mx.nd.ones((300, 300))
        for _ in range(3):
            x = mx.nd.dot(x, mx.nd.ones((300, 300))) / 300
        x = x * (rank + 1)
        reader = x * 2  # reads x, perhaps later than the reduction writes it
        hvd.allreduce_(x, op=hvd.Sum)
        after = x + 1
        total = size * (size + 1) / 2
        assert (reader.asnumpy() == 2 * (rank + 1)).all()
        assert (after.asnumpy() == total + 1).all()


def check_refusals():
    sparse = mx.nd.ones((3, 2)).tostype("row_sparse")
    optimizer = mx.optimizer.SGD()
    refused(ValueError, r"tostype\('default'\)", lambda: hvd.allreduce(sparse))
    refused(
        TypeError, "expected an NDArray of MXNet, got ndarray", lambda: hvd.allreduce(np.ones(3))
    )
    refused(ValueError, "splits=", lambda: hvd.alltoall(mx.nd.ones(4), splits=array([0.5])))
    refused(ValueError, "collect_params", lambda: hvd.broadcast_parameters([1, 2]))
    refused(ValueError, "num_groups", lambda: hvd.DistributedOptimizer(optimizer, num_groups=-1))
    refused(
        TypeError, "compression=", lambda: hvd.DistributedTrainer({}, "sgd", compression="fp16")
    )


# ---- training --------------------------------------------------------------------------------------------------------


def network(seed, deferred=False, units=5):
    mx.random.seed(seed)
    # Without a prefix, MXNet counts the networks that a process has made, in their names.
    net = mx.gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(mx.gluon.nn.Dense(units, activation="tanh", in_units=0 if deferred else 6))
        net.add(mx.gluon.nn.Dense(1, in_units=0 if deferred else units))
    net.initialize(mx.init.Uniform(0.5))
    return net


def batches(key, steps, size):
    """For each step the images and labels of all ranks: (size, 4, 6), (size, 4, 1)."""
    draws = np.random.default_rng(key)
    for _ in range(steps):
        yield draws.random((size, 4, 6), np.float32), draws.random((size, 4, 1), np.float32)


def step_of(net, trainer, data, labels):
    with mx.autograd.record():
        loss = ((net(array(data)) - array(labels)) ** 2).mean()
    loss.backward()
    trainer.step(1)


def values_of(net):
    return [p.data().asnumpy() for _, p in sorted(net.collect_params().items())]


def check_trainer(options, tolerance, key):
    """Training on the parts of a batch is training on the whole batch."""
    rank, size = hvd.rank(), hvd.size()
    settings = {"learning_rate": 0.05, "momentum": 0.9}
    whole = network(key)
    alone = mx.gluon.Trainer(whole.collect_params(), "sgd", settings)
    net = network(key + 1 + rank)
    # The root has the weights of the network that is trained alone.
    if rank == 0:
        for mine, other in zip(
            net.collect_params().values(), whole.collect_params().values(), strict=True
        ):
            mine.set_data(other.data())
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    compression = getattr(hvd.Compression, options.pop("compression", "none"))
    trainer = hvd.DistributedTrainer(
        net.collect_params(), "sgd", settings, compression=compression, **options
    )
    for data, labels in batches(key, 5, size):
        step_of(net, trainer, data[rank], labels[rank])
        step_of(whole, alone, data.reshape(-1, 6), labels.reshape(-1, 1))
    for mine, wanted in zip(values_of(net), values_of(whole), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=tolerance, atol=tolerance)
    return [value.tobytes() for value in values_of(net)]


def check_optimizer(key, groups, as_list):
    """As MXNet's modules use an optimizer."""
    rank, size = hvd.rank(), hvd.size()
    inner = mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, num_groups=groups)
    assert isinstance(optimizer, mx.optimizer.Optimizer)
    optimizer.rescale_grad = 0.5  # which modules set
    assert inner.rescale_grad == 0.5
    assert optimizer.learning_rate == 0.1
    update = mx.optimizer.get_updater(optimizer)
    reference = mx.optimizer.get_updater(
        mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9, rescale_grad=0.5)
    )
    weights = [mx.nd.ones(n) for n in (3, 4, 5)]
    wanted = [w.copy() for w in weights]
    for i in range(4):
        everyone = [[of_rank(r, key + i, w.shape, "float32") for w in weights] for r in range(size)]
        mean = [array(np.mean([e[k] for e in everyone], axis=0)) for k in range(3)]
        mine = [array(g) for g in everyone[rank]]
        if as_list:
            update([0, 1, 2], mine, weights)
        else:
            for k in range(3):
                update(k, mine[k], weights[k])
        for k in range(3):
            reference(k, mean[k], wanted[k])
    for weight, right in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(weight.asnumpy(), right.asnumpy(), rtol=1e-5)


def check_deferred_parameters(key):
    rank = hvd.rank()
    net = network(key + rank, deferred=True)
    hvd.broadcast_parameters(net.collect_params(), root_rank=1)
    net(mx.nd.ones((2, 6)))  # from which the shapes are known
    return [value.tobytes() for value in values_of(net)]


def check_parameters_of_modules():
    rank = hvd.rank()
    params = {"b": mx.nd.ones(2) * rank, "a": mx.nd.ones((2, 3)) * rank}
    hvd.broadcast_parameters(params, root_rank=1, prefix="module.")
    same(params["a"], np.ones((2, 3)))
    same(params["b"], np.ones(2))


def check_process_sets(key):
    """Rank 0 trains by itself, the others together."""
    rank, size = hvd.rank(), hvd.size()
    others = hvd.add_process_set(range(1, size))
    net = network(key)
    trainer = hvd.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, process_set=others
    )
    for data, labels in batches(key, 3, size):
        step_of(net, trainer, data[rank], labels[rank])
    hvd.barrier()
    hvd.remove_process_set(others)
    return [value.tobytes() for value in values_of(net)]


def check_objects():
    assert hvd.broadcast_object({"epoch": hvd.rank()}, root_rank=1) == {"epoch": 1}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def check_stub():
    path = stubs.PACKAGE / "mxnet" / "operations.pyi"
    assert path.read_text() == stubs.stub_of("mxnet"), "run: make stubs"


# ---- failures --------------------------------------------------------------------------------------------------------


def step_beside_a_killed_rank(victim, key):
    rank, size = hvd.rank(), hvd.size()
    net = network(key)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for i, (data, labels) in enumerate(batches(key, 1000, size)):
        if rank == victim and i == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        step_of(net, trainer, data[rank], labels[rank])


def different_networks():
    net = network(1, units=5 if hvd.rank() == 0 else 7)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with mx.autograd.record():
        loss = net(mx.nd.ones((4, 6))).mean()
    loss.backward()
    trainer.step(1)


def check_elastic(key):
    """After a failed operation, the state of the last commit is there again, on all ranks that of rank 0."""
    rank, size = hvd.rank(), hvd.size()
    net = network(key + rank)
    trainer = hvd.DistributedTrainer(
        net.collect_params(), "adam", {"learning_rate": 0.1}, prefix="elastic."
    )
    failures = []

    @hvd.elastic.run
    def train(state):
        while state.step < 6:
            data, labels = list(batches(key, 6, size))[state.step]
            step_of(net, trainer, data[rank], labels[rank])
            state.step += 1
            if state.step == 3:
                state.commit()
            if state.step == 5 and not failures:
                failures.append(state.step)
                for p in net.collect_params().values():
                    p.set_data(p.data() * random.random())
                raise hvd.HorovodInternalError("as if a rank had failed")
        return state.step

    state = hvd.elastic.MXNetState(params=net.collect_params(), trainer=trainer, step=0)
    assert train(state) == 6
    assert failures == [5]
    reference = network(key)
    alone = mx.gluon.Trainer(reference.collect_params(), "adam", {"learning_rate": 0.1})
    for data, labels in batches(key, 6, size):
        step_of(reference, alone, data.reshape(-1, 6), labels.reshape(-1, 1))
    for mine, wanted in zip(values_of(net), values_of(reference), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-3, atol=1e-4)
    return [value.tobytes() for value in values_of(net)]
