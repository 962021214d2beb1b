"""Which calls of a public function go to the core at once, and that they do what the function in Python does."""

import functools
import gc
import inspect
import os
import pickle
import random
import signal
from contextlib import nullcontext

import numpy as np
import pytest

import horoplug as hvd
from horoplug.common.context import context
from horoplug.common.ops import direct, direct_barrier
from horoplug.common.opspec import BY_NAME
from horoplug.common.reduce_ops import Adasum
from horoplug.numpy.adapter import NumpyAdapter
from tests.harness.checks.errors import errors_of_survivors, internal, refused
from tests.harness.support import NO_LIMITS, once_this_thread_waits, ranks_fixture, seed, until

pytest_plugins = ["tests.harness.jobs"]
pytestmark = [
    pytest.mark.short,
    pytest.mark.skipif("HOROPLUG_DIRECT_CALLS" in os.environ, reason="they are switched off"),
]

ranks = ranks_fixture("a", "aa", "ab")
without = ranks_fixture("aa", env={"HOROPLUG_DIRECT_CALLS": "0"})

NUMBERS = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]


class Array(np.ndarray):
    pass


class Text(str):
    pass


class Number(int):
    pass


def in_python(*_, **__):
    return "in Python"


IN_PLACE = direct(NumpyAdapter(), BY_NAME["allreduce"], True, True, in_python)
STARTED = direct(NumpyAdapter(), BY_NAME["allreduce"], True, False, in_python)
INTO_NEW = direct(NumpyAdapter(), BY_NAME["allreduce"], False, True, in_python)


def check_usual_calls():
    size = hvd.size()
    for dtype in NUMBERS:
        for x in (np.ones(5, dtype), np.ones((2, 1, 3), dtype), np.array(1, dtype)):
            made = INTO_NEW(x, op=hvd.Sum, name="é" * 100)
            assert (made == size).all()
            assert (made.dtype, made.shape) == (x.dtype, x.shape)
            assert made is not x
            assert IN_PLACE(x, op=hvd.Sum) is x
            assert (x == size).all()
    assert INTO_NEW(np.full(3, hvd.rank(), "f4"), name="average").tolist() == [(size - 1) / 2] * 3
    for op, expected in ((hvd.Min, 0), (hvd.Max, size - 1), (hvd.Product, 0)):
        assert INTO_NEW(np.array([hvd.rank()]), op=op, name="op").tolist() == [expected]
    frozen = np.ones(3)
    frozen.flags.writeable = False
    assert INTO_NEW(frozen, op=hvd.Sum).tolist() == [size] * 3


def test_usual_calls_go_to_the_core(ranks):
    ranks.run(check_usual_calls)


OTHERS = {
    name: direct(NumpyAdapter(), BY_NAME[name], False, True, in_python)
    for name in (
        *("allgather", "broadcast", "alltoall", "reducescatter", "reduce", "gather", "scatter"),
        *("send", "recv"),
    )
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")
BARRIER = direct_barrier(in_python)
BROADCAST_IN_PLACE = direct(NumpyAdapter(), BY_NAME["broadcast"], True, True, in_python)


def check_other_operations():
    size, rank = hvd.size(), hvd.rank()
    x = np.arange(6 * size, dtype="i4").reshape(2 * size, 3) + 100 * rank
    every = np.stack([x - 100 * (rank - each) for each in range(size)])
    part = slice(2 * rank, 2 * rank + 2)
    for options in ({}, {"name": "again"}, {"name": "again"}):
        gathered = OTHERS["allgather"](x, **options)
        assert gathered.tolist() == np.concatenate(every).tolist()
        received = OTHERS["alltoall"](x, **options)
        assert received.tolist() == np.concatenate(every[:, part]).tolist()
        scattered = OTHERS["reducescatter"](x, op=hvd.Sum, **options)
        assert scattered.tolist() == every.sum(0)[part].tolist()
        averaged = OTHERS["reducescatter"](x.astype("f4"), **options)
        assert averaged.tolist() == every.mean(0)[part].tolist()
        for root in range(size):
            assert OTHERS["broadcast"](x, root, **options).tolist() == every[root].tolist()
            reduced = OTHERS["reduce"](x, root_rank=root, op=hvd.Max, **options)
            assert reduced.tolist() == (every.max(0) if root == rank else x).tolist()
            gathered = OTHERS["gather"](x, root, **options)
            expected = np.concatenate(every) if root == rank else x[:0]
            assert gathered.tolist() == expected.tolist()
            assert gathered.shape == expected.shape
            assert OTHERS["scatter"](x, root, **options).tolist() == every[root, part].tolist()
    y = x.copy()
    assert BROADCAST_IN_PLACE(y, root_rank=size - 1) is y
    assert y.tolist() == every[size - 1].tolist()
    # The core allocates the result if the ranks give different numbers of rows.
    mine = [np.full((each + 1, 2), each, "f8") for each in range(size)]
    for _ in range(2):
        gathered = OTHERS["allgather"](mine[rank], name="rows")
        assert gathered.tolist() == np.concatenate(mine).tolist()
        collected = OTHERS["gather"](mine[rank], 0, name="rows")
        assert collected.tolist() == (np.concatenate(mine) if rank == 0 else mine[0][:0]).tolist()
        sent = np.full(((rank + 1) * size, 2), rank, "i2")
        received = OTHERS["alltoall"](sent, name="parts")
        assert received.tolist() == np.concatenate(mine).astype("i2").tolist()
    # The first ranks get one row more.
    rest = OTHERS["reducescatter"](np.arange(2 * size + 1), op=hvd.Sum)
    first = 2 * rank + min(rank, 1)
    assert rest.tolist() == [size * i for i in range(first, first + 2 + (rank == 0))]
    if size > 1:
        refused(ValueError, "not a multiple of", lambda: OTHERS["alltoall"](np.ones(size + 1)))
    for name in ROOTED:
        refused(ValueError, "root rank 7 does not exist", lambda f=OTHERS[name]: f(x, 7))


GROUP_IN_PLACE = direct(NumpyAdapter(), BY_NAME["allreduce"], True, True, in_python, grouped=True)
GROUP = direct(NumpyAdapter(), BY_NAME["allreduce"], False, True, in_python, grouped=True)
GROUP_STARTED = direct(NumpyAdapter(), BY_NAME["allreduce"], True, False, in_python, grouped=True)


def check_groups():
    size = hvd.size()
    for count in (1, 2, 200):
        for options in ({}, {"name": "group"}, {"name": "group"}):
            given = [np.full((i % 7 + 1, 2), i, "f4") for i in range(count)]
            expected = [(x * size).tolist() for x in given]
            for group in (given, tuple(given)):
                made = GROUP(group, op=hvd.Sum, **options)
                assert type(made) is list
                assert [x.tolist() for x in made] == expected
            result = GROUP_IN_PLACE(given, op=hvd.Sum, **options)
            assert all(x is y for x, y in zip(result, given, strict=True))
            handle = GROUP_STARTED(given, op=hvd.Max, **options)
            assert type(handle) is int
            given.clear()  # the operation keeps the tensors
            gc.collect()
            assert [x.tolist() for x in hvd.synchronize(handle)] == expected
    x = np.ones(3)
    for group in ([], (), x, [x, x.astype("f4")], [x, None], [x, 1.0], [x, x[::2]], {0: x}, "ab"):
        assert GROUP(group) == GROUP_IN_PLACE(group) == "in Python"
    assert isinstance(hvd.grouped_allreduce_, type(GROUP))
    assert not isinstance(hvd.grouped_allgather, type(GROUP))
    if size > 1:
        rows = [np.ones(3), np.ones(2 + hvd.rank())]
        call = functools.partial(GROUP, rows, name="differ")
        refused(hvd.HorovodInternalError, "'allreduce.differ': mismatched shape", call)


def test_groups_go_to_the_core(ranks):
    ranks.run(check_groups)


def check_point_to_point():
    size, rank = hvd.size(), hvd.rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    send, recv = OTHERS["send"], OTHERS["recv"]
    start = direct(NumpyAdapter(), BY_NAME["send"], False, False, in_python)
    for options in ({}, {"name": "pair"}, {"name": "pair"}):
        for tag in (0, 3):
            for shape in ((), (5,), (400, 500)):
                x, y = np.full(shape, rank + tag, "f4"), np.empty(shape, "f4")
                handle = start(x, after, tag, **options)
                assert type(handle) is int
                assert recv(y, source=before, tag=tag, **options) is y
                assert (y == before + tag).all()
                assert hvd.synchronize(handle) is None
    if size > 1:
        y = np.empty(3)
        for first in range(size):  # one rank after the other sends to all others
            for other in range(size):
                if rank == first != other:
                    assert send(np.full(3, first), dest=other) is None
                elif rank == other != first:
                    assert recv(np.empty(3, "i8"), first).tolist() == [first] * 3
    refused(ValueError, "rank 7 does not exist", lambda: send(np.ones(3), 7))
    assert not context.operations
    x = np.ones(3)
    for function in (send, recv):
        for call in (
            lambda f=function: f(x),
            lambda f=function: f(x, True),
            lambda f=function: f(x, -1),
            lambda f=function: f(x, 0, -1),
            lambda f=function: f(x, 0, 0, "name"),
            lambda f=function: f(x, 0, tag=1.0),
            lambda f=function: f(x, 0, 1, tag=1),
            lambda f=function: f(x, root_rank=0),
            lambda f=function: f(x, 0, op=hvd.Sum),
        ):
            assert call() == "in Python"
    frozen = np.ones(3)
    frozen.flags.writeable = False
    assert recv(frozen, 0) == "in Python"
    assert OTHERS["broadcast"](x, 0, tag=0) == "in Python"


def test_send_and_recv_go_to_the_core(ranks):
    ranks.run(check_point_to_point)


def check_barrier(folder):
    for _ in range(5):
        assert BARRIER() is None
    for options in ({"process_set": hvd.global_process_set}, {"name": "a"}, {"op": hvd.Sum}):
        assert BARRIER(**options) == "in Python"
    assert BARRIER(hvd.global_process_set) == BARRIER(None) == "in Python"
    assert isinstance(hvd.barrier, type(BARRIER))
    assert list(inspect.signature(hvd.barrier).parameters) == ["process_set"]
    # It is one barrier, whichever way each rank takes.
    for step in range(4):
        (hvd.barrier if (step + hvd.rank()) % 2 else hvd.barrier.__wrapped__)()
    # Nobody passes before all ranks have come, also if that takes longer than a wait in the core.
    waits, passed = folder / "waits", folder / f"passed-{hvd.rank()}"
    if hvd.rank() > 0:
        until(waits.exists)
        assert not (folder / "passed-0").exists()

    def note():
        until(lambda: context.operations)
        assert not passed.exists()
        waits.touch()

    with once_this_thread_waits(note) if hvd.rank() == 0 < hvd.size() - 1 else nullcontext():
        assert BARRIER() is None
    passed.touch()
    assert not context.operations
    # As after any operation that the program has waited for.
    handle = hvd.allreduce_async(np.ones(3), name="before")
    BARRIER()
    context.check_name(0, "allreduce.before")
    hvd.synchronize(handle)


def test_barrier_goes_to_the_core(ranks, tmp_path):
    ranks.run(check_barrier, tmp_path)


def die_among_direct_calls(victim, name):
    x = np.ones(2 * hvd.size())
    function = {
        "barrier": BARRIER,
        "gather": lambda: OTHERS["gather"](x, 0, name="waiting"),
        "scatter": lambda: OTHERS["scatter"](x, victim, name="waiting"),
        "recv": lambda: OTHERS["recv"](x, victim, name="waiting"),
    }[name]
    for step in range(100):
        if hvd.rank() == victim:
            if step == 50:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "recv":
                for other in range(hvd.size()):
                    if other != victim:
                        OTHERS["send"](x, other)
                continue
        function()


@pytest.mark.short(failure=True)
@pytest.mark.parametrize("name", ["barrier", "gather", "scatter", "recv"])
@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_killed_rank_is_named_with_the_operation(pool, hosts, name):
    victim = len(hosts) - 1
    with pool.ranks(len(hosts), hosts=hosts, env=NO_LIMITS) as job:
        errors = errors_of_survivors(job.outcomes(die_among_direct_calls, victim, name), victim)
        internal(errors, name if name == "barrier" else f"'{name}.waiting'")


def check_unusual_calls_of_other_operations():
    x = np.ones((2 * hvd.size(), 3))
    for name in ROOTED:
        function = OTHERS[name]
        for root in (True, Number(0), -1, 2**40, 2**80, 0.0, None, "0"):
            assert function(x, root) == function(x, root_rank=root) == "in Python", root
        for call in (
            lambda f=function: f(x),
            lambda f=function: f(x, name="a"),
            lambda f=function: f(x, 0, root_rank=0),
            lambda f=function: f(x, 0, 0),
        ):
            assert call() == "in Python"
    assert (
        OTHERS["broadcast"](x, 0, op=hvd.Sum) == OTHERS["allgather"](x, op=hvd.Sum) == "in Python"
    )
    assert OTHERS["gather"](np.array(1.0), 0) == OTHERS["scatter"](np.array(1.0), 0) == "in Python"
    assert OTHERS["gather"](x[:0], 0) == OTHERS["scatter"](x, 0, splits=None) == "in Python"
    for name in ("allgather", "alltoall", "reducescatter"):
        function = OTHERS[name]
        assert (
            function(np.array(1.0)) == function(x, None) == function(x, root_rank=0) == "in Python"
        )
    assert OTHERS["alltoall"](x, splits=None) == "in Python"
    assert (
        OTHERS["reducescatter"](x, op=hvd.Max) == OTHERS["reduce"](x, 0, op=Adasum) == "in Python"
    )
    for name in OTHERS:
        is_one = isinstance(getattr(hvd, name), type(IN_PLACE))
        assert is_one, name
        started = getattr(hvd, f"{name}_async")
        has_direct = name in ("broadcast", "reduce", "send", "recv")
        assert isinstance(started, type(IN_PLACE)) == has_direct, name


def test_usual_calls_of_other_operations_go_to_the_core(ranks):
    ranks.run(check_other_operations)
    ranks.run(check_unusual_calls_of_other_operations)


def check_started_operations():
    size = hvd.size()
    x = np.ones(5, "f4")
    for options in ({}, {"name": "started"}):
        x[:] = 1
        handle = STARTED(x, op=hvd.Sum, **options)
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle) is x
        assert x.tolist() == [size] * 5
        assert hvd.synchronize(handle) is None
        assert hvd.poll(handle)
    # Many at once, and tensors that nothing else keeps.
    handles = [hvd.allreduce_async(np.full(3, i, "i8"), op=hvd.Sum, name=f"{i}") for i in range(99)]
    gc.collect()
    for i in reversed(range(99)):
        assert hvd.synchronize(handles[i]).tolist() == [i * size] * 3
    assert not context.operations
    # Failures come with the result, once.
    if size > 1:
        handle = STARTED(np.ones(3 + hvd.rank()), name="differs")
        failure = functools.partial(hvd.synchronize, handle)
        refused(hvd.HorovodInternalError, "'allreduce.differs': mismatched shape", failure)
        assert hvd.synchronize(handle) is None
    # One that was not waited for at the end of the job is known to belong to it.
    handle = STARTED(x, op=hvd.Sum, name="last")
    hvd.barrier()
    hvd.shutdown()
    assert STARTED(x) == "in Python"
    hvd.init()
    refused(hvd.HorovodInternalError, "belongs to a job", lambda: hvd.synchronize(handle))


def test_started_operations_are_waited_for(ranks):
    ranks.run(check_started_operations)


def check_unusual_calls():
    x = np.ones((2, 3))
    frozen = x.copy()
    frozen.flags.writeable = False
    for tensor in (
        *(x > 0, x + 0j, x[:0], x.T, x[:, ::2], x.view(Array), x.astype(">f8"), x.astype("m8[s]")),
        np.zeros(9, "u1")[1:].view("f8"),  # not aligned
        *(x.tolist(), 1.0, np.float32(1), x.view([("a", "f8")]), np.array(["a"]), None),
    ):
        for function in (IN_PLACE, INTO_NEW):
            assert function(tensor) == "in Python", tensor
    assert IN_PLACE(frozen) == "in Python"
    for options in (
        *(
            {"name": name}
            for name in ("", None, "a" * 201, "é" * 101, "a\0b", 3, Text("a"), "\ud800")
        ),
        *({"op": op} for op in (None, Adasum, True, Number(1), 9, -1, 2**70, 1.0, "Sum")),
        *({"prescale_factor": 1.0}, {"average": None}, {"process_set": hvd.global_process_set}),
        *({"compression": None}, {"op": hvd.Sum, "name": 3}, {"colour": 1}),
    ):
        assert IN_PLACE(x, **options) == "in Python", options
    assert IN_PLACE(x, None) == IN_PLACE() == IN_PLACE(tensor=x) == IN_PLACE(x, x) == "in Python"
    for start in (hvd.allreduce_async, hvd.allreduce_async.__wrapped__):
        handle = start(x, name="waits")
        for function in (IN_PLACE, INTO_NEW, STARTED):
            assert function(x, name="waits") == "in Python"
        for function in (hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async.__wrapped__):
            call = functools.partial(function, x, name="waits")
            refused(ValueError, "allreduce.waits is still in flight", call)
        assert IN_PLACE(x, name="other") is x
        # The program has waited for an operation since, so that the core alone knows.
        context.check_name(0, "allreduce.waits")
        hvd.synchronize(handle)
        assert IN_PLACE(x, name="waits") is x
    for waits in (hvd.synchronize, lambda handle: until(lambda: hvd.poll(handle))):
        handle = STARTED(x, name="waits")
        assert STARTED(x, name="waits") == "in Python"
        waits(handle)
        context.check_name(0, "allreduce.waits")
        hvd.synchronize(handle)


def test_all_other_calls_go_to_the_function_in_python(ranks):
    ranks.run(check_unusual_calls)


def check_random_calls(number):
    draw = random.Random(number)
    for index in range(200):
        shape = [draw.randint(0, 4) for _ in range(draw.randint(0, 3))]
        dtype = draw.choice([*NUMBERS, "?", "c8"])
        x = np.random.default_rng([number, index, hvd.rank()]).integers(0, 9, shape).astype(dtype)
        options = {}
        if draw.random() < 0.7:
            options["op"] = draw.choice([hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Average])
        if draw.random() < 0.7:
            options["name"] = f"{draw.randint(0, 5)}"
        function = draw.choice(
            [
                *(hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allgather, hvd.alltoall),
                *(hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.reduce),
                *(hvd.reducescatter, hvd.gather, hvd.scatter),
            ]
        )
        if function.__name__.partition("_")[0] in ROOTED:
            options["root_rank"] = draw.randint(0, hvd.size())
        if "reduce" not in function.__name__:
            options.pop("op", None)
        if function in (hvd.allgather, hvd.gather) and draw.random() < 0.5:
            x = (
                np.repeat(x, draw.choices(range(3), k=hvd.size())[hvd.rank()], axis=0)
                if x.ndim
                else x
            )
        results = [outcome(each, x.copy(), options) for each in (function, function.__wrapped__)]
        assert results[0] == results[1], (number, index, function, x, options)


def outcome(function, x, options):
    try:
        made = function(x, **options)
        if type(made) is int:
            made = hvd.synchronize(made)
    except Exception as error:
        return type(error), str(error)
    return type(made), made.dtype, made.shape, made.tobytes()


def test_both_ways_have_the_same_results(ranks):
    ranks.run(check_random_calls, seed())


def check_names_that_come_again():
    size = hvd.size()
    for _ in range(2):
        for x in (np.ones(3, "f4"), np.ones((3, 1), "f4"), np.ones(3, "i4"), np.ones(7, "i4")):
            for options in ({}, {"name": "again"}):
                for op, expected in ((hvd.Sum, size), (hvd.Min, 1), (hvd.Sum, size)):
                    made = INTO_NEW(x, op=op, **options)
                    assert made.tolist() == np.full(x.shape, expected).tolist()
                    assert made.dtype == x.dtype
        hvd.shutdown()
        hvd.init()
    # Names that do not come again are forgotten.
    x = np.zeros(1)
    for i in range(2**14 + 10):
        IN_PLACE(x, name=f"{i}")
    kept = [
        len(each) for each in gc.get_referents(IN_PLACE) if type(each) is dict and f"{i}" in each
    ]
    assert len(kept) == 1
    assert kept[0] < 100


def test_a_name_comes_again_with_other_arrays_and_in_another_job(ranks):
    ranks.run(check_names_that_come_again)


def check_failures():
    x = np.ones(3 + hvd.rank(), "f4")
    for function in (hvd.allreduce, hvd.allreduce_):
        if hvd.size() > 1:
            call = functools.partial(function, x, name="differs")
            refused(hvd.HorovodInternalError, "'allreduce.differs': mismatched shape", call)
        assert function(np.ones(3), name="after", op=hvd.Sum).tolist() == [hvd.size()] * 3


def test_failures_are_those_of_the_function_in_python(ranks):
    ranks.run(check_failures)


def check_late_rank(folder):
    for function in (IN_PLACE, INTO_NEW):
        waits = folder / f"{function is IN_PLACE}"

        def note(file=waits):
            until(lambda: context.operations)  # the core has looked for signals, and waits again
            file.touch()

        if hvd.rank() > 0:
            until(waits.exists)
        notes = once_this_thread_waits(note) if hvd.rank() == 0 < hvd.size() - 1 else nullcontext()
        with notes:
            result = function(np.ones(3), name="late", op=hvd.Sum)
        assert result.tolist() == [hvd.size()] * 3
        assert not context.operations


def check_late_rank_with_rows(folder):
    """The core allocates the result of a rank that waits for long, or writes it to the output."""
    for differ in (0, 1):
        waits = folder / f"{differ}"

        def note(file=waits):
            until(lambda: context.operations)
            file.touch()

        if hvd.rank() > 0:
            until(waits.exists)
        rows = [np.full(1 + differ * rank, rank) for rank in range(hvd.size())]
        notes = once_this_thread_waits(note) if hvd.rank() == 0 < hvd.size() - 1 else nullcontext()
        with notes:
            result = OTHERS["allgather"](rows[hvd.rank()], name="late")
        assert result.tolist() == np.concatenate(rows).tolist()
        assert not context.operations


def test_call_goes_on_while_another_rank_is_late(ranks, tmp_path):
    ranks.run(check_late_rank, tmp_path)
    ranks.run(check_late_rank_with_rows, tmp_path)


def check_interrupt():
    if hvd.rank() == 0:
        interrupt = os.kill, os.getpid(), signal.SIGINT
        for function in (IN_PLACE, INTO_NEW):
            with once_this_thread_waits(*interrupt), pytest.raises(KeyboardInterrupt):
                function(np.ones(3), op=hvd.Sum, name=f"{function is IN_PLACE}")
        kept = list(context.operations)
        assert len(kept) == 2
        hvd.allgather_object("go")
        for handle in kept:
            assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
    else:
        hvd.allgather_object("go")
        for function in (IN_PLACE, INTO_NEW):
            function(np.ones(3), op=hvd.Sum, name=f"{function is IN_PLACE}")


def test_interrupted_call_keeps_its_tensors(ranks):
    if ranks.size > 1:
        ranks.run(check_interrupt)


def check_child():
    child = os.fork()
    if child == 0:
        try:
            hvd.allreduce_(np.ones(3))
        except ValueError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_forked_child_is_not_in_the_job(ranks):
    ranks.run(check_child)


def check_switched_off():
    x = np.ones(3)
    assert IN_PLACE(x) == INTO_NEW(x) == BARRIER() == OTHERS["gather"](x, 0) == "in Python"
    hvd.barrier()
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [hvd.size()] * 3


def test_direct_calls_can_be_switched_off(without):
    without.run(check_switched_off)


def test_barrier_looks_like_a_function_of_python():
    assert pickle.loads(pickle.dumps(hvd.barrier)) is hvd.barrier
    assert inspect.isroutine(hvd.barrier)
    with pytest.raises(ValueError, match=r"use hvd\.init"):
        hvd.barrier()


def test_a_description_is_checked():
    make, calls = type(IN_PLACE), context.direct
    with pytest.raises(TypeError, match="failed"):
        make(in_python, calls)
    with pytest.raises(TypeError, match="colour"):
        make(in_python, calls, print, "a.", 0, colour=1)
    with pytest.raises(ValueError, match="PyCapsule"):
        make(in_python, calls, print, "a.", 0, tensor_type=np.ndarray, exchange=1)


def test_function_looks_like_one_of_python():
    function = hvd.allreduce_
    assert pickle.loads(pickle.dumps(function)) is function
    assert inspect.isroutine(function)
    assert list(inspect.signature(function).parameters)[:3] == ["tensor", "average", "name"]
    assert repr(function) == "<function allreduce_>"

    class Holder:
        method = function

    assert Holder().method.__self__.__class__ is Holder
    with pytest.raises(ValueError, match=r"use hvd\.init"):
        function(np.ones(3))
