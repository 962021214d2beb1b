"""Operations in functions that XLA compiles, compared with the same operations in eager mode."""

import os
import random
import re
import signal
import textwrap
import threading

import numpy as np
import pytest

from tests.harness.checks.errors import errors_of_survivors
from tests.harness.limits import scaled
from tests.harness.support import NO_LIMITS, ranks_fixture, run_script, seed

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")
is_failure = pytest.importorskip("horoplug.tensorflow.elastic").is_failure

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "ab")

DTYPES = "uint8 int8 uint16 int16 int32 int64 float16 float32 float64 bfloat16 uint32 uint64"


def compiled(function):
    return tf.function(function, jit_compile=True, autograph=False)


def same(function, *inputs):
    """Checks that the result has the same bits as in eager mode, and returns it."""
    eager = tf.nest.flatten(function(*inputs))
    results = tf.nest.flatten(compiled(function)(*inputs))
    for a, b in zip(eager, results, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.numpy().tobytes() == b.numpy().tobytes(), (a, b)
    return [result.numpy().tolist() for result in results]


def close(function, *inputs):
    """The same up to differences in XLA's rounding."""
    np.testing.assert_allclose(compiled(function)(*inputs), function(*inputs), 1e-4, 1e-6)


def normal(key, *shape):
    return np.random.default_rng(key).normal(size=shape).astype("float32")


def check_operations(key):
    size, rank = hvd.size(), hvd.rank()
    for dtype in DTYPES.split():
        x = tf.cast(tf.range(5) + rank, dtype)
        same(lambda x: hvd.allreduce(x, op=hvd.Sum), x)
    x = tf.constant(normal([key, rank], 2 * size, 3))
    group = [x, x[0], x[0, 0], x[:0], tf.cast(x, tf.int32), x > 0]
    total = same(lambda *group: hvd.grouped_allreduce(group, op=hvd.Sum), *group[:5])
    assert total[3] == []
    same(lambda x: hvd.allreduce(x, op=hvd.Max), group[5])
    for op in (hvd.Average, hvd.Min, hvd.Product, *([hvd.Adasum] if size == 2 else [])):
        same(lambda x, op=op: hvd.allreduce(x, op=op), x)
    # Factors with many digits, and names with special characters.
    factors = {
        "prescale_factor": 1 / 3,
        "postscale_factor": 1e-7 / 7,
        "name": "we\"ird \n%s 'ö 1 2",
    }
    same(lambda x: hvd.allreduce(x, op=hvd.Sum, **factors), tf.cast(x, tf.float64))
    same(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), x)
    same(lambda x: hvd.broadcast(x, size - 1), x)
    assert same(lambda: hvd.allgather(tf.fill([2], rank))) == [
        [r for r in range(size) for _ in "ab"]
    ]
    same(lambda *x: hvd.grouped_allgather(x), x, x[0, 0], x[0])
    same(hvd.alltoall, x)
    same(lambda x: hvd.alltoall(x, [2] * size), x)
    same(hvd.reducescatter, x)
    same(lambda *x: hvd.grouped_reducescatter(x, op=hvd.Sum), x, x[:size])
    numbers = same(lambda: [hvd.size_op(), hvd.rank_op(), hvd.local_size_op(), hvd.local_rank_op()])
    assert numbers[:2] == [size, rank]
    hidden = compiled(lambda x: (hvd.barrier(), hvd.allreduce(x, name="unused"), x)[-1])
    assert hidden(x[0]).shape == 3


@pytest.mark.short("ab")
def test_results_match_eager_mode(ranks):
    ranks.run(check_operations, seed())


def check_process_sets():
    rank = hvd.rank()
    alone = [hvd.add_process_set([r]) for r in range(2)][rank]
    options = {"process_set": alone}
    total = compiled(
        lambda x: (hvd.allreduce(x, op=hvd.Sum, **options), hvd.allgather(x, **options))
    )
    assert [t.numpy().tolist() for t in total(tf.fill([1], rank))] == [[rank], [rank]]
    assert int(compiled(lambda: hvd.process_set_included_op(alone.process_set_id))()) == 1


def test_operations_on_process_sets(pool):
    with pool.ranks(2) as job:
        job.run(check_process_sets)


def check_gradients(key):
    size, rank = hvd.size(), hvd.rank()
    x = tf.constant(normal([key, rank], 2 * size, 3))
    weights = tf.constant(normal([key, rank, 1], 2 * size * size, 3))

    def gradient_of(function):
        def compute(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x**2)
                loss = tf.reduce_sum(y * weights[: y.shape[0]])
            return tape.gradient(loss, x)

        return compute

    def looped(x):
        for _ in range(3):
            x = hvd.allreduce(x * 2)
        return x

    def loop(x):
        turn = lambda n, x: (n + 1, hvd.allreduce(x * 2))  # noqa: E731
        return tf.while_loop(lambda n, x: n < 3, turn, [0, x], maximum_iterations=3)[1]

    close(gradient_of(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=1 / 3)), x)
    close(gradient_of(lambda x: tf.add_n(hvd.grouped_allreduce([x, x * 0]))), x)
    close(gradient_of(lambda x: hvd.broadcast(x, size - 1)), x)
    close(gradient_of(hvd.allgather), x)
    close(gradient_of(lambda x: hvd.allgather(x[0, 0])[:, None]), x)
    close(gradient_of(hvd.alltoall), x)
    close(gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum)), x)
    close(gradient_of(gradient_of(lambda x: hvd.allreduce(x**3))), x)
    expected = gradient_of(looped)(x)
    np.testing.assert_allclose(compiled(gradient_of(loop))(x), expected, 1e-4, 1e-6)
    with pytest.raises(NotImplementedError, match="op=Max has no gradient"):
        compiled(gradient_of(lambda x: hvd.allreduce(x, op=hvd.Max)))(x)
    function = compiled(lambda x: hvd.allreduce(x**2))
    with tf.GradientTape() as tape:  # outside of the compiled function
        tape.watch(x)
        y = function(x)
    np.testing.assert_allclose(tape.gradient(y, x), 2 * x, 1e-6)


def test_gradients_match_eager_mode(ranks):
    ranks.run(check_gradients, seed())


def check_training(key):
    """Compares a compiled step with one that is not compiled, from the same weights."""
    size, rank = hvd.size(), hvd.rank()
    table, layer = (tf.Variable(normal(key, *shape)) for shape in ((20, 4), (4, 1)))
    alone = tf.Variable(1.0)
    variables = [table, layer, alone]
    calls = []

    def step(rows):
        tape = hvd.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=2.0)
        tape.register_local_source(alone)
        with tape:
            hidden = tf.tanh(tf.gather(table, rows))  # its gradient is a tf.IndexedSlices
            loss = tf.reduce_mean((hidden @ layer * alone - 1.0) ** 2)
        grads = tape.gradient(loss, variables)
        calls.append(grads)
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(grad))
        return loss

    start = [v.numpy() for v in variables]
    batches = np.random.default_rng([key, rank]).integers(0, 20, [4, 5 + rank])
    results = []
    for function in (step, compiled(step)):
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        losses = [float(function(batch)) for batch in batches]
        results.append([*losses, *(v.numpy() for v in variables)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-6)
    bits = hvd.allgather_object([v.numpy().tobytes() for v in variables[:2]])
    assert bits == bits[:1] * size
    assert not isinstance(calls[-1][0], tf.IndexedSlices)


def test_training_matches_eager_mode(ranks):
    ranks.run(check_training, seed())


def in_a_chain(text):
    """The number of custom calls on which the last one depends, including itself, and the number of all calls."""
    needs = {}
    for line in text.splitlines():
        name, *operands = re.findall(r"%([\w.-]+)", line) or [None]
        needs[name] = operands
    calls = {
        re.findall(r"%([\w.-]+)", line)[0] for line in text.splitlines() if "custom-call(" in line
    }

    def reach(name, seen):
        if name not in seen:
            seen.add(name)
            for operand in needs.get(name, []):
                reach(operand, seen)
        return seen

    return max(len(calls & reach(last, set())) for last in calls), len(calls)


def check_order():
    """Many operations in loops, branches and functions, some of which were traced outside of compiled functions."""
    size, rank = hvd.size(), hvd.rank()
    x = tf.fill([2], float(rank))
    ranks_sum = size * (size - 1) / 2
    inner = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="inner"))
    assert inner(x).numpy().tolist() == [ranks_sum] * 2

    def body(x, flag):
        parts = [hvd.allreduce(x + n, op=hvd.Sum) for n in range(30)]
        turn = lambda n, y: (n + 1, y + hvd.allreduce(x, op=hvd.Sum, name="turn"))  # noqa: E731
        parts.append(tf.while_loop(lambda n, y: n < 3, turn, [0, x * 0])[1])
        parts.append(tf.cond(flag, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: inner(x) * 2))
        return [*parts, inner(x)][:: 1 - 2 * (rank % 2)]  # the order differs between ranks

    first, second = compiled(body), compiled(body)
    outer = tf.function(lambda x, f: [first(x, f), second(x, f), [inner(x)]], autograph=False)
    for flag in (True, False):
        expected = [ranks_sum + size * n for n in range(30)]
        expected += [ranks_sum * 3, ranks_sum * (1 if flag else 2), ranks_sum]
        expected = expected[:: 1 - 2 * (rank % 2)]
        for function in (first, second):
            assert [float(p[0]) for p in function(x, tf.constant(flag))] == expected
        results = outer(x, tf.constant(flag))
        assert [[float(p[0]) for p in part] for part in results] == [
            expected,
            expected,
            [ranks_sum],
        ]
    text = compiled(lambda x: [hvd.allreduce(x + n) for n in range(5)])
    assert in_a_chain(text.experimental_get_compiler_ir(x)(stage="hlo")) == (5, 5)


def test_calls_run_in_program_order(ranks):
    ranks.run(check_order)


def check_threads():
    """Programs compiled by one thread run in others, which the ranks start in opposite order."""
    size, rank = hvd.size(), hvd.rank()
    programs = [
        compiled(lambda x, n=n: hvd.allreduce(x, op=hvd.Sum, name=f"thread{n}")) for n in range(3)
    ]
    for program in programs:
        program(tf.ones(2))
    failures = []

    def work(program):
        try:
            for turn in range(30):
                assert program(tf.fill([2], float(turn))).numpy().tolist() == [turn * size] * 2
        except BaseException as error:
            failures.append(error)

    order = programs[:: 1 - 2 * (rank % 2)]
    threads = [threading.Thread(target=work, args=(program,)) for program in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(50))
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_programs_in_several_threads(ranks):
    ranks.run(check_threads)


def check_errors():
    size, rank = hvd.size(), hvd.rank()
    refused = {
        "join cannot": lambda x: hvd.join(),
        "alltoall cannot.*equal parts": lambda x: hvd.alltoall(x, [0, 4]),
        "reducescatter cannot.*3 rows.*2 ranks": lambda x: hvd.reducescatter(x[:3]),
    }
    for match, function in refused.items():
        with pytest.raises(NotImplementedError, match=f"{match}.*Use jit_compile=False"):
            compiled(function)(tf.ones(4))
    unknown = tf.function(
        hvd.allreduce, jit_compile=True, input_signature=[tf.TensorSpec([None, 2])]
    )
    with pytest.raises(ValueError, match=r"allreduce.*\(None, 2\).*ensure_shape"):
        unknown(tf.ones([3, 2]))

    total = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum, name="total"))
    joined = compiled(lambda x: hvd.allgather(x))
    for _ in range(2):
        assert total(tf.ones(2)).numpy().tolist() == [size] * 2
        disagree = r"FAILED_PRECONDITION.*'allreduce.total'.*shape.*rank 1.*\[HorovodAllreduce\]"
        with pytest.raises(tf.errors.InternalError, match=disagree) as caught:
            total(tf.ones(2 + rank))
        assert is_failure(caught.value)
        with pytest.raises(
            tf.errors.InternalError, match=r"INVALID_ARGUMENT.*compiled for"
        ) as mine:
            joined(tf.ones(2 + rank))
        assert not is_failure(mine.value)
        assert joined(tf.ones(1)).numpy().tolist() == [1] * size

    # Compiled on one rank only, the operation has the same name.
    function = total if rank else lambda x: hvd.allreduce(x, op=hvd.Sum, name="total")
    assert function(tf.ones(2)).numpy().tolist() == [size] * 2

    hvd.shutdown()
    with pytest.raises(tf.errors.InternalError, match=r"FAILED_PRECONDITION.*hvd.init\(\)"):
        total(tf.ones(2))
    hvd.init()
    assert total(tf.ones(2)).numpy().tolist() == [size] * 2


def test_errors_are_reported(pool):
    with pool.ranks(2) as job:
        job.run(check_errors)


def reduce_for_ever(victim, key):
    step = compiled(
        lambda x: [hvd.allreduce(x, name="waiting"), hvd.allreduce(x[:9], name="other")]
    )
    step(tf.ones(50_000))
    if hvd.rank() == victim:
        kill = threading.Timer(
            random.Random(key).uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGKILL)
        )
        kill.start()
    try:
        while True:
            step(tf.ones(50_000))
    except tf.errors.InternalError as error:
        if is_failure(error):
            raise


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_killed_rank_is_reported(pool, hosts):
    key = seed()
    victim = random.Random(key).randrange(len(hosts))
    with pool.ranks(len(hosts), hosts=hosts, env=NO_LIMITS) as job:
        errors_of_survivors(job.outcomes(reduce_for_ever, victim, key), victim, "InternalError")
        type(job)([w for r, w in enumerate(job.workers) if r != victim]).run(hvd.shutdown)


def check_keras(key):
    """``fit`` of a model with a custom train step, and of one with a distributed optimizer."""
    rank = hvd.rank()
    keras = tf.keras

    class Stepping(keras.Model):
        def train_step(self, data):
            x, y = data
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            variables = self.trainable_variables
            grads = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(grads, variables, strict=True))
            return {"mine": loss}

    keras.utils.set_random_seed(rank)
    random = np.random.default_rng([key, rank])
    x = random.normal(size=(40 + rank, 4)).astype(
        "float32"
    )  # the last batches have different sizes
    kinds = [(Stepping, keras.optimizers.Adam(0.05), None)]
    try:
        from horoplug.keras import DistributedOptimizer
    except ImportError:
        pass
    else:
        distributed = DistributedOptimizer(keras.optimizers.Adam(0.05))
        kinds.append((keras.Model, distributed, "mse"))
    for kind, optimizer, loss in kinds:
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        model = kind(inputs, keras.layers.Dense(1)(hidden))
        model.compile(optimizer, loss, jit_compile=True)
        assert model.jit_compile
        hvd.broadcast_variables(model.variables, root_rank=0)
        before = np.mean((model.predict(x, verbose=0) - x[:, :1]) ** 2)
        model.fit(x, x[:, :1], epochs=5, batch_size=16, verbose=0)
        bits = hvd.allgather_object([v.numpy().tobytes() for v in model.trainable_variables])
        assert all(b == bits[0] for b in bits), "ranks have different weights"
        assert np.mean((model.predict(x, verbose=0) - x[:, :1]) ** 2) < before


def test_compiled_keras_fit(pool):
    with pool.ranks(2) as job:
        job.run(check_keras, seed())


def test_missing_custom_call_operation_is_an_error_in_compiled_functions_only(tmp_path):
    """Without TensorFlow's operation for custom calls, operations in compiled functions raise, and others work."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import tensorflow as tf
            sys.modules["tensorflow.compiler.tf2xla.ops"] = None
            import horoplug.tensorflow as hvd
            hvd.init()
            try:
                tf.function(lambda x: hvd.allreduce(x), jit_compile=True)(tf.ones(2))
            except NotImplementedError as error:
                assert "lacks xla_custom_call_v2. Use jit_compile=False" in str(error), error
            else:
                raise SystemExit("compiled")
            assert tf.function(lambda x: hvd.allreduce(x))(tf.ones(2)).numpy().tolist() == [1, 1]
            """
        )
    )
    (done,) = run_script(script)
    assert done.returncode == 0, done.stderr[-3000:]
