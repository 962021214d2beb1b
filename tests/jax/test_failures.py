"""Failures with JAX: ranks that disagree, die or shut down while a program runs. Import errors, memory and the use of a
single core are tested in new processes."""

import os
import random
import signal
import textwrap
import threading

import numpy as np
import pytest

from tests.harness.checks.errors import errors_of_survivors
from tests.harness.limits import scaled
from tests.harness.support import NO_LIMITS, run_script, seed

jax = pytest.importorskip("jax")
hvd = pytest.importorskip("horoplug.jax")
jnp = jax.numpy

pytest_plugins = ["tests.harness.jobs"]

FAILURE = jax.errors.JaxRuntimeError.__name__


def run(function, *arguments):
    return jax.block_until_ready(jax.jit(function)(*arguments))


def large(x):
    """A computation with the value of x that is too large for XLA to run on the calling thread."""
    return jnp.tanh(jnp.ones((200, 200)) @ jnp.ones((200, 200))).sum() * 0 + x


# ---- a rank dies ----------------------------------------------------------------------------------------------------


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def pending_in_a_program(victim, _):
    step = jax.jit(lambda x: [hvd.allreduce(large(x), name=f"waiting{i}") for i in range(20)])
    compiled = step.lower(jnp.ones(10)).compile()
    if hvd.rank() == victim:
        die()
    jax.block_until_ready(compiled(jnp.ones(10)))


def pending_at_any_moment(victim, key):
    """Large and small operations in repeated steps, several of which are in flight."""
    inputs = [jnp.ones(n) for n in [3, 1_000_000, 50, 300_000]]

    @jax.jit
    def step(inputs):
        return [hvd.allreduce(x, name=f"waiting{i}") for i, x in enumerate(inputs)]

    step(inputs)
    if hvd.rank() == victim:
        threading.Timer(random.Random(key).uniform(0.0, 0.5), die).start()
    while True:
        jax.block_until_ready([step(inputs) for _ in range(3)])


def pending_eagerly(victim, _):
    if hvd.rank() == victim:
        die()
    hvd.allreduce(jnp.ones(10), name="waiting")


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("phase", [pending_in_a_program, pending_at_any_moment, pending_eagerly])
@pytest.mark.short(failure=True)
def test_killed_rank_is_reported(pool, phase, hosts):
    key = seed()
    victim = random.Random(key).randrange(len(hosts))
    with pool.ranks(len(hosts), hosts=hosts, env=NO_LIMITS) as job:
        kind = "HorovodInternalError" if phase is pending_eagerly else FAILURE
        errors_of_survivors(job.outcomes(phase, victim, key), victim, kind)
        survivors = type(job)([w for r, w in enumerate(job.workers) if r != victim])
        after = survivors.outcomes(lambda: run(hvd.allreduce, jnp.ones(2)))
        assert all(o.kind == FAILURE and f"rank {victim}" in o.message for o in after)
        survivors.run(hvd.shutdown)


# ---- mismatches -----------------------------------------------------------------------------------------------------


def check_disagreement():
    """Every rank gets an error that describes both ranks' inputs, and the job continues. In programs that XLA runs on
    the calling thread and in others, and in the middle of a program."""
    rank = hvd.rank()
    works = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="works"))

    cases = {
        r"mismatched shape: \[3\] on rank 0 but \[4\]": lambda x: x[: 3 + rank],
        "mismatched data type: float32 on rank 0 but int32": lambda x: x.astype(
            [x.dtype, int][rank]
        ),
    }
    for work in (lambda x: x), large:
        for message, change in cases.items():

            def program(x, work=work, change=change):
                first = hvd.allreduce(work(x), op=hvd.Sum)
                second = hvd.allreduce(change(work(x)), name="bad")
                return first, second, hvd.allreduce(first, name="after it")

            for _ in range(2):
                with pytest.raises(RuntimeError, match=f"'allreduce.bad': {message}"):
                    run(program, jnp.ones(5))
                assert works(jnp.ones(2)).tolist() == [2, 2]
        with pytest.raises(RuntimeError, match=r"'allreduce\.x'.*sum on rank 0 but max on rank 1"):
            run(lambda x, work=work: OPERATIONS[rank](work(x)), jnp.ones(4))
        assert works(jnp.ones(2)).tolist() == [2, 2]
    # The results of the failed program are not read.
    unread = jax.jit(lambda x: hvd.allreduce(large(x), name="unread"))
    unread.lower(jnp.ones(3 + rank)).compile()
    unread(jnp.ones(3 + rank))
    hvd.barrier()
    assert works(jnp.ones(2)).tolist() == [2, 2]
    assert hvd.allreduce(jnp.ones(2), op=hvd.Sum).tolist() == [2, 2]


OPERATIONS = [
    lambda x: hvd.allreduce(x, op=hvd.Sum, name="x"),
    lambda x: hvd.allreduce(x, op=hvd.Max, name="x"),
]


@pytest.mark.short(failure=True)
def test_mismatch_is_reported_and_the_job_continues(pool):
    with pool.ranks(2) as job:
        job.run(check_disagreement)


def check_unread_failure(is_shut_down):
    """Programs are called repeatedly and their results are not read: a later call raises the failure."""
    step = jax.jit(lambda x: hvd.allreduce(large(x), name="gradient"))

    def call_repeatedly(x):
        for _ in range(10_000):
            x = step(jnp.ones(4) if is_shut_down else x)

    for rows in (4, 4 + hvd.rank()):  # compiled in advance, so that only the operation takes time
        step.lower(jnp.ones(rows)).compile()
    x = step(jnp.ones(4))
    if is_shut_down and hvd.rank() == 1:
        hvd.shutdown()
    elif is_shut_down:
        with pytest.raises(RuntimeError, match=r"'allreduce.gradient'.*rank 1 has shut down"):
            call_repeatedly(x)
        hvd.shutdown()
    else:
        x = step(jnp.ones(4 + hvd.rank()))
        with pytest.raises(RuntimeError, match=r"'allreduce.gradient'.*\[4\] on rank 0"):
            call_repeatedly(x)
        assert step(jnp.ones(4)).tolist() == [1] * 4
        hvd.shutdown()
    hvd.init()
    assert step(jnp.ones(4)).tolist() == [1] * 4


@pytest.mark.parametrize("is_shut_down", [False, True], ids=["disagree", "shut down"])
def test_unread_failure_is_raised_by_a_later_call(pool, is_shut_down):
    with pool.ranks(2) as job:
        job.run(check_unread_failure, is_shut_down)


def check_program_of_the_last_job():
    """Rank 1 leaves and joins again while a program computes the input of an operation."""

    def sums(x, rounds):
        square = jax.lax.fori_loop(0, rounds, lambda _, y: jnp.tanh(y @ y), jnp.ones((300, 300)))
        return hvd.allreduce(square.sum() * 0 + x, op=hvd.Sum, name="gradient")

    late, step = (jax.jit(lambda x, n=n: sums(x, n)) for n in (1000, 1))
    for program in (late, step):
        program.lower(jnp.ones(4)).compile()
    if hvd.rank() == 1:
        late(jnp.full(4, 100.0))
    hvd.shutdown()
    hvd.init()
    assert step(jnp.ones(4)).tolist() == [2] * 4
    hvd.barrier()


def test_operation_of_a_program_does_not_join_the_next_job(pool):
    with pool.ranks(2) as job:
        job.run(check_program_of_the_last_job)


def check_deadlock():
    """Two ranks wait for different operations, on one thread and on two."""
    rank = hvd.rank()
    names = ["one", "two"][:: 1 - 2 * rank]

    def both(x):
        return [hvd.allreduce(large(x), name=name) for name in names]

    with pytest.raises(RuntimeError, match=r"deadlock.*Rank 0 .*\.one.*rank 1 .*\.two"):
        run(both, jnp.ones(2))
    programs = [jax.jit(lambda x, n=n: hvd.allreduce(large(x), name=n)) for n in names]
    for program in programs:
        program.lower(jnp.ones(2)).compile()
    failures = []

    def work(program):
        try:
            jax.block_until_ready(program(jnp.ones(2)))
        except RuntimeError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=work, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
        thread.join(0.2)  # starts them in this order
    for thread in threads:
        thread.join(scaled(30))
        assert not thread.is_alive()
    assert all("deadlock" in failure for failure in failures)
    hvd.barrier()
    assert run(lambda x: hvd.allreduce(x, op=hvd.Sum), jnp.ones(2)).tolist() == [2, 2]


def test_deadlock_is_reported(pool):
    with pool.ranks(2, env={"HOROVOD_DEADLOCK_TIME_SECONDS": "0.3"}) as job:
        job.run(check_deadlock)


def check_frameworks_match_by_name():
    """Operations of JAX inside and outside of programs and of NumPy are matched by name."""
    import horoplug as plain

    ways = [
        lambda x: run(lambda x: hvd.allreduce(x, op=hvd.Sum, name="shared"), jnp.asarray(x)),
        lambda x: plain.allreduce(x, op=hvd.Sum, name="shared"),
        lambda x: hvd.allreduce(jnp.asarray(x), op=hvd.Sum, name="shared"),
    ]
    for turn in range(3):
        x = np.arange(4, dtype=np.float32)
        assert (np.asarray(ways[(hvd.rank() + turn) % 3](x)) == 2 * x).all()


def test_frameworks_match_by_name(pool):
    with pool.ranks(2) as job:
        job.run(check_frameworks_match_by_name)


# ---- shutdown and init ----------------------------------------------------------------------------------------------


def check_programs_of_previous_job():
    """Programs that were compiled in a previous job."""
    size = hvd.size()
    programs = [
        jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum)),
        jax.jit(lambda x: hvd.allgather(x).sum(keepdims=True)),
        jax.jit(lambda x: hvd.allreduce(x * hvd.size(), op=hvd.Max)),
    ]
    x = jnp.ones(1)
    ahead = programs[1].lower(x).compile()
    for program in programs:
        assert program(x).tolist() == [size]
    if hvd.rank() == 0:
        hvd.shutdown()
        with pytest.raises(RuntimeError, match=r"has not been initialized; use hvd\.init"):
            jax.block_until_ready(programs[0](x))
        with pytest.raises(ValueError, match="has not been initialized"):
            jax.jit(lambda x: hvd.allgather(x))(x)
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.allreduce(x)
    else:
        with pytest.raises(RuntimeError, match="rank 0 has shut down"):
            run(lambda x: hvd.allreduce(x, name="never"), x)
        hvd.shutdown()
    hvd.init()
    for program in programs:
        assert program(x).tolist() == [size]
    hvd.shutdown()
    hvd.init(comm=[int(os.environ["HOROVOD_RANK"])])  # alone
    for program in programs:
        assert program(x).tolist() == [1]
    with pytest.raises(RuntimeError, match=r"compiled for rank \d of 2, but is rank 0 of 1 now"):
        jax.block_until_ready(ahead(x))
    hvd.shutdown()
    hvd.init()


def test_init_after_shutdown(pool):
    with pool.ranks(2) as job:
        for _ in range(2):
            job.run(check_programs_of_previous_job)


def check_shutdown_while_pending():
    failures = []
    pending = jax.jit(lambda x: [hvd.allreduce(large(x), name=f"p{i}") for i in range(5)])
    compiled = pending.lower(jnp.ones(3)).compile()

    def wait():
        try:
            jax.block_until_ready(compiled(jnp.ones(3)))
        except RuntimeError as error:
            failures.append(str(error))

    if hvd.rank() == 0:
        thread = threading.Thread(target=wait)
        thread.start()
        hvd.allgather(jnp.ones(1), name="begun")
        hvd.shutdown()
        thread.join(scaled(30))
        assert not thread.is_alive()
        assert len(failures) == 1
    else:
        hvd.allgather(jnp.ones(1), name="begun")
        with pytest.raises(RuntimeError, match="rank 0 has shut down"):
            run(lambda x: hvd.allreduce(x, name="never"), jnp.ones(3))
        hvd.shutdown()
    hvd.init()
    assert run(lambda x: hvd.allreduce(x, op=hvd.Sum), jnp.ones(2)).tolist() == [2, 2]


def test_shutdown_while_operations_are_pending(pool):
    with pool.ranks(2) as job:
        for _ in range(2):
            job.run(check_shutdown_while_pending)


# ---- new processes --------------------------------------------------------------------------------------------------


def run_code(tmp_path, code, size=1, **options):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    done = run_script(script, size=size, **options)
    for each in done:
        assert each.returncode == 0, each.stderr[-3000:]
    return done


def test_operations_with_a_single_xla_thread(tmp_path):
    """XLA has a single thread, which an operation blocks while it waits."""
    run_code(
        tmp_path,
        """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import jax, jax.numpy as jnp
        import horoplug.jax as hvd
        hvd.init()
        rank = hvd.rank()

        @jax.jit
        def step(x):
            parts = []
            for i in range(16):
                y = x
                for _ in range((i * 5 + rank * 3) % 4):
                    y = jnp.tanh(y @ y)
                parts.append(hvd.allreduce(y[: i + 1, 0] * 0 + i, op=hvd.Sum))
            return parts

        x = jnp.ones((100 + 50 * rank, 100 + 50 * rank))
        for _ in range(5):
            results = step(x)
            at_once = hvd.allreduce(jnp.ones(2), op=hvd.Sum)
        assert [p.tolist() for p in results] == [[2.0 * i] * (i + 1) for i in range(16)]
        """,
        size=2,
        env={"HOROPLUG_OPERATION_TIMEOUT_SECONDS": "30"},  # a failure then names the operation
    )


@pytest.mark.parametrize(
    ("missing", "module", "use"),
    [
        ("jax", "horoplug.jax", "pass"),
        ("optax", "horoplug.jax", "hvd.DistributedOptimizer(None)"),
    ],
)
def test_missing_package_raises_import_error(tmp_path, missing, module, use):
    run_code(
        tmp_path,
        f"""
        import sys
        sys.modules["{missing}"] = None
        try:
            import {module} as hvd
            {use}
        except ImportError as error:
            assert "pip install {missing}" in str(error), error
        else:
            raise SystemExit("no ImportError")
        """,
    )


def test_operations_do_not_leak_memory(tmp_path):
    """Operations release their memory when they complete or fail."""
    pytest.importorskip("psutil")
    run_code(
        tmp_path,
        """
        import psutil
        import jax, jax.numpy as jnp
        import horoplug.jax as hvd
        hvd.init()

        @jax.jit
        def step(x):
            def body(x, _):
                parts = [hvd.allreduce(x), hvd.broadcast(x, 0), hvd.allgather(x), hvd.reducescatter(x)]
                return sum(parts) / 4, None
            return jax.lax.scan(body, x, None, length=250)[0]

        bad = jax.jit(lambda x: hvd.broadcast(x, 7))

        def grown():
            before = psutil.Process().memory_info().rss
            jax.block_until_ready(step(jnp.ones(10_000)))
            for _ in range(100):
                hvd.allgather(hvd.allreduce(jnp.ones(10_000)))
                try:
                    jax.block_until_ready(bad(jnp.ones(10_000)))
                except RuntimeError:
                    pass
            return psutil.Process().memory_info().rss - before

        for _ in range(18):  # the core keeps a record of the last 16384 operations
            grown()
        # 250 operations of 40 kB: a leak would be 10 MB.
        assert min(grown() for _ in range(5)) < 1_000_000
        """,
    )
