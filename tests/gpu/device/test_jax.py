"""JAX arrays on a GPU give the same results as on the CPU, inside and outside of compiled programs."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the GPU

import functools

import numpy as np
import pytest

from tests.gpu.device.device_jobs import gpu_pool as gpu_pool
from tests.gpu.device.device_jobs import ranks as ranks

jax = pytest.importorskip("jax")

import horoplug.jax as hvd  # noqa: E402
from horoplug.jax import gpu  # noqa: E402

jnp = jax.numpy

DTYPES = ["float32", "bfloat16", "int32", "bool"]
SHAPES = [(), (5, 3), (1000, 33), (0, 4)]


def cuda_devices():
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def need():
    """Why these tests cannot run here; None if they can."""
    return None if cuda_devices() else "JAX finds no CUDA device"


def own_gpu():
    """The GPU of this rank. The ranks share the machine's GPUs."""
    devices = cuda_devices()
    return devices[hvd.local_rank() % len(devices)]


def cpu():
    return jax.devices("cpu")[0]


def values(dtype, shape, key=0):
    """This rank's array in the host's memory: small whole numbers, whose sums are exact in every dtype."""
    made = np.random.default_rng([key, hvd.rank()]).integers(0, 2 if dtype == "bool" else 5, shape)
    return jax.device_put(np.asarray(made).astype(jnp.dtype(dtype)), cpu())


def equal(found, expected):
    assert found.devices() == {own_gpu()}
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def same(function, *arrays):
    """Check that eager and compiled calls give the same results on the GPU as on the CPU."""
    expected = jax.tree_util.tree_leaves(function(*arrays))
    on_gpu = [jax.device_put(array, own_gpu()) for array in arrays]
    for compiled in jax.jit(function), function:
        found = jax.tree_util.tree_leaves(compiled(*on_gpu))
        for result, wanted in zip(found, expected, strict=True):
            equal(result, wanted)
    for array, original in zip(on_gpu, arrays, strict=True):
        equal(array, original)


def check_operations(dtype):
    size = hvd.size()
    ops = [hvd.Max, hvd.Min] if dtype == "bool" else [hvd.Sum, hvd.Max, hvd.Min]
    for n, shape in enumerate(SHAPES):
        mine = values(dtype, shape, n)
        for op in ops:
            same(lambda x, op=op: hvd.allreduce(x, op=op), mine)
        same(lambda x: hvd.broadcast(x, size - 1), mine)
        same(hvd.allgather, mine)
    rows = values(dtype, (2 * size + 1, 3))
    same(hvd.alltoall, rows[: 2 * size])
    same(lambda x: hvd.alltoall(x, [2] * size), rows)
    if dtype != "bool":
        same(lambda x: hvd.reducescatter(x, op=hvd.Sum), rows)
    if dtype.startswith(("float", "bfloat")):
        same(lambda x: hvd.allreduce(x, prescale_factor=0.5, postscale_factor=4.0), rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_gpu_operations_match_cpu(ranks, dtype):
    ranks.run(check_operations, dtype)


def check_rows():
    """The number of rows differs between ranks."""
    rank, size = hvd.rank(), hvd.size()
    mine = values("float32", (rank + size + 1, 3))
    on_gpu = jax.device_put(mine, own_gpu())
    assert gpu.is_on_gpu(on_gpu)
    equal(hvd.allgather(on_gpu), hvd.allgather(mine))
    splits = [rank + 1] + [1] * (size - 1)
    found, counts = hvd.alltoall(on_gpu, splits)
    expected, expected_counts = hvd.alltoall(mine, splits)
    equal(found, expected)
    assert counts.tolist() == expected_counts.tolist()
    if size > 1:
        with pytest.raises(RuntimeError, match="the same number of rows on every rank"):
            jax.block_until_ready(jax.jit(lambda x: hvd.allgather(x, name="rows"))(on_gpu))
        equal(hvd.allreduce(on_gpu[:3], op=hvd.Sum), hvd.allreduce(mine[:3], op=hvd.Sum))


def test_allgather_and_alltoall_of_different_row_counts(ranks):
    ranks.run(check_rows)


def check_order():
    """Much work precedes and follows each of many operations, in programs that are dispatched without waiting."""
    size = hvd.size()

    @jax.jit
    def step(x, work):
        for _ in range(5):
            work = work @ work
            work = work / jnp.linalg.norm(work)
        x = x + work.sum() * 0
        hvd.allgather(x, name="unused")
        return hvd.allreduce(x, op=hvd.Sum, name="x") / size + 1, work

    x = jax.device_put(jnp.zeros(100_000), own_gpu())
    work = jax.device_put(jnp.eye(1500), own_gpu())
    for _ in range(20):
        x, work = step(x, work)
    x = hvd.allreduce(x, name="at once")
    assert np.asarray(x).tolist() == [20.0] * 100_000


def test_operations_run_in_program_order(ranks):
    ranks.run(check_order)


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return ((hidden @ params["v"] - 1) ** 2).mean()


def trained(device, make, steps=6):
    random = np.random.default_rng(3)
    put = functools.partial(jax.device_put, device=device)
    shapes = {"w": (8, 32), "b": (32,), "v": (32, 2)}
    params = {name: put(random.normal(size=s).astype("f4") / 5) for name, s in shapes.items()}
    if hvd.rank() > 0:
        params = jax.tree_util.tree_map(jnp.zeros_like, params)
    params = hvd.broadcast_parameters(params, root_rank=0)
    update = make()
    state = update.init(params)
    state = hvd.broadcast_optimizer_state(state, root_rank=0)

    @jax.jit
    def step(params, state, x):
        updates, state = update.update(jax.grad(loss)(params, x), state, params)
        return jax.tree_util.tree_map(jnp.add, params, updates), state

    data = np.random.default_rng(hvd.rank())
    for _ in range(steps):
        params, state = step(params, state, put(data.normal(size=(16, 8)).astype("f4")))
    assert all(leaf.devices() == {device} for leaf in jax.tree_util.tree_leaves(params))
    return params


def check_training():
    import optax

    for options in {}, {"compression": hvd.Compression.fp16}, {"backward_passes_per_step": 2}:

        def make(options=options):
            return hvd.DistributedOptimizer(optax.adam(0.01), **options)

        found, expected = trained(own_gpu(), make), trained(cpu(), make)
        for name, wanted in expected.items():
            np.testing.assert_allclose(
                np.asarray(found[name]), np.asarray(wanted), rtol=2e-3, atol=2e-4
            )


def test_training_on_gpu_matches_cpu(ranks):
    pytest.importorskip("optax")
    ranks.run(check_training)


def check_gradients():
    def both(params, x):
        value, grads = hvd.distributed_value_and_grad(loss)(params, x)
        return hvd.allreduce(value), grads

    # By default, JAX multiplies float32 matrices on a GPU in TF32, which has 10 bits.
    with jax.default_matmul_precision("highest"):
        compare_gradients(both)


def compare_gradients(both):
    random = np.random.default_rng(5)
    params = {"w": random.normal(size=(8, 4)), "b": np.zeros(4), "v": random.normal(size=(4, 2))}
    x = np.random.default_rng(hvd.rank()).normal(size=(16, 8)).astype("f4")
    results = []
    for device in cpu(), own_gpu():
        put = functools.partial(jax.device_put, device=device)
        placed = jax.tree_util.tree_map(lambda leaf, put=put: put(leaf.astype("f4")), params)
        for compiled in jax.jit(both), both:
            results.append(jax.tree_util.tree_leaves(compiled(placed, put(x))))
    for result in results[1:]:
        for found, wanted in zip(result, results[0], strict=True):
            np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=2e-3, atol=2e-4)


def test_gradients_on_gpu_match_cpu(ranks):
    ranks.run(check_gradients)


def check_failures():
    """A mismatch is an error on every rank, inside and outside of programs, and later operations work."""
    x = jax.device_put(jnp.ones(3 + hvd.rank()), own_gpu())
    with pytest.raises(hvd.HorovodInternalError, match=r"allreduce\.x"):
        hvd.allreduce(x, name="x")
    with pytest.raises(RuntimeError, match=r"allreduce\.y"):
        jax.block_until_ready(jax.jit(lambda x: hvd.allreduce(x, name="y"))(x))
    for compiled in jax.jit(hvd.allreduce), hvd.allreduce:
        assert np.asarray(compiled(x[:3])).tolist() == [1.0] * 3


def test_mismatch_is_an_error_and_the_job_continues(ranks):
    if ranks.size == 1:
        pytest.skip("one rank agrees with itself")
    ranks.run(check_failures)
