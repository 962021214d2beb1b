"""Arrays on GPUs through ``import horoplug``, in jobs of several processes: results equal those of NumPy arrays. The
GPUs are simulated (harness/simulated_gpu.py): memory that is read too early has wrong values."""

import itertools
import re
import signal
import time

import numpy as np
import pytest

import horoplug as hvd
from tests.harness import simulated_gpu
from tests.harness.checks.gpu import (
    check_batches,
    check_groups,
    check_join,
    check_many,
    check_mismatch,
    check_operations,
    check_streams,
    equal,
    on_host,
    values,
)
from tests.harness.limits import scaled
from tests.harness.simulated_jobs import device, device_ranks_fixture, job_fixture
from tests.harness.support import until

JOBS = {
    "2 ranks": ("aa", 2, None),
    "2 ranks, staged": ("aa", 2, "staged"),
    "2 ranks, one GPU": ("aa", 1, None),
    "2 hosts, staged": ("ab", 2, "staged"),
    "4 ranks": ("aaaa", 4, None),
    "4 ranks, staged": ("aaaa", 4, "staged"),
    "4 ranks, IPC": ("aaaa", 4, "ipc"),
}


job = job_fixture()
ranks = device_ranks_fixture(JOBS)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
@pytest.mark.short("2*float32")
def test_operations_on_gpu_arrays_match_numpy(ranks, dtype):
    ranks.run(check_operations, dtype)


def check_empty_array():
    """An array without elements, before any other array is on a GPU."""
    array = device().array(np.empty((0, 3), np.float32))
    equal(hvd.allreduce(array, op=hvd.Sum), np.empty((0, 3), np.float32))
    mine = values("float32", (4,))
    equal(hvd.allgather(device().array(mine)), hvd.allgather(mine))


def test_first_array_is_empty(job):
    with job("aa", 1, None) as ranks:
        ranks.run(check_empty_array)


def check_forgotten():
    """Arrays of handles that are never waited for stay alive until the next init, when the GPU is done with them."""
    array = device().array(values("float32", (100,)))
    handles = [hvd.allreduce_async_(array, op=hvd.Sum, name=f"f{n}") for n in range(3)]
    hvd.barrier()
    while not all(hvd.poll(handle) for handle in handles):
        pass
    assert all(hvd.common.context.context.operations[handle] for handle in handles)


def test_batches_groups_streams_and_refusals(ranks):
    for check in (
        check_many,
        check_batches,
        check_groups,
        check_streams,
        check_join,
        check_mismatch,
    ):
        ranks.run(check)
    ranks.run(check_forgotten)


def count_nccl_allreduces():
    """How often NCCL was used for another allreduce."""
    before = device().count("AllReduce")
    hvd.allreduce(device().array(values("float32", (100,))), op=hvd.Sum)
    return device().count("AllReduce") - before


def check_streams_on_hold():
    """Operations complete while the streams are held; the results are correct once the streams continue. The first
    operation of each kind may wait for those before it."""
    mine = values("float32", (1000,))
    expected = hvd.allreduce(mine, op=hvd.Sum)
    array = device().array(mine)
    hvd.allgather(hvd.allreduce(array, op=hvd.Sum))
    device().synchronize()
    waits = device().host_waits()
    device().hold()
    try:
        assert hvd.allreduce_(array, op=hvd.Sum, name="ahead") is array
        gathered = hvd.allgather(array, name="behind")
        assert device().host_waits() == waits
    finally:
        device().resume()
    equal(array, expected)
    equal(gathered, np.concatenate([expected] * hvd.size()))


def test_transport_of_gpu_data(ranks, request):
    hosts, devices, algorithm = JOBS[request.node.callspec.params["ranks"]]
    nccl = algorithm is None and devices >= len(hosts)
    assert ranks.run(count_nccl_allreduces) == [int(nccl)] * len(hosts)
    if nccl:
        ranks.run(check_streams_on_hold)


def check_process_sets():
    """Overlapping process sets run operations on the same GPU independently."""
    size, rank = hvd.size(), hvd.rank()
    sets = [
        hvd.add_process_set(members)
        for members in ([0, 1], list(range(1, size)), range(0, size, 2))
    ]
    mine = values("float32", (1000,))
    expected = [
        hvd.allreduce(mine, op=hvd.Sum, process_set=s) if s.included() else None for s in sets
    ]
    handles = [
        hvd.allreduce_async(device().array(mine), op=hvd.Sum, process_set=s)
        if s.included()
        else None
        for s in sets
    ]
    for handle, wanted in zip(handles, expected, strict=True):
        if handle is not None:
            equal(hvd.synchronize(handle), wanted)
    assert rank < size


@pytest.mark.parametrize("algorithm", [None, "staged"])
def test_overlapping_process_sets_on_one_gpu(job, algorithm):
    with job("aaaa", 4, algorithm, HOROVOD_DYNAMIC_PROCESS_SETS="1") as ranks:
        ranks.run(check_process_sets)


def check_large(timeline):
    """Run an allreduce of several windows, of which rank 0 writes a timeline. Returns how often this rank used NCCL."""
    mine = values("float32", (5_000_001,))
    expected = hvd.allreduce(mine, op=hvd.Sum)
    before = device().count("ReduceScatter")
    hvd.start_timeline(str(timeline))
    equal(hvd.allreduce(device().array(mine), op=hvd.Sum), expected)
    hvd.stop_timeline()
    return device().count("ReduceScatter") - before


# Number of GPUs, and variables. With one GPU for all ranks, NCCL cannot be used within a host.
HIERARCHICAL = [
    (4, {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}),
    (1, {"HOROPLUG_ALGORITHM": "hierarchical"}),
    (1, {}),
]


@pytest.mark.parametrize(("devices", "env"), HIERARCHICAL)
def test_hierarchical_allreduce_on_gpus(job, tmp_path, devices, env):
    with job("aabb", devices, HOROVOD_TIMELINE="DYNAMIC", **env) as ranks:
        for dtype in ("float32", "int16"):
            ranks.run(check_operations, dtype)
        ranks.run(check_many)
        used = ranks.run(check_large, tmp_path / "timeline.json")
    assert '"hierarchical"' in (tmp_path / "timeline.json").read_text()
    assert [times > 0 for times in used] == [devices > 1] * 4


def quick():
    """Short time limits. The stopped rank may be in a transfer, or before an operation that the others have begun."""
    return {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{scaled(2):.1f}",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": f"{scaled(2):.1f}",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": f"{scaled(10):.1f}",
    }


def start_processes(job, hosts, devices, algorithm, op=hvd.Sum):
    """Run operations in a job without short time limits, whose processes the next job uses again. New processes load
    libraries and code, which may take longer than the limits of quick() on a busy machine."""
    with job(hosts, devices, algorithm) as ranks:
        ranks.run(allreduce_three_times, op)


def allreduce_three_times(op):
    array = device().array(values("float32", (10_000,)))
    for _ in range(3):
        hvd.allreduce(array, op=op)


def check_errors_name_the_lost_rank(ranks, how, function, *args):
    """Kill or stop rank 1 while the ranks run a function. Checks that the errors of the others name the operation and
    the rank, and returns the errors."""
    ranks.start(function, *args)
    lost = ranks.workers[1]
    ranks.until(args[0].exists)
    lost.process.send_signal(how)
    try:
        outcomes = [worker.receive() for worker in ranks.workers if worker is not lost]
    finally:
        lost.process.send_signal(signal.SIGCONT)
    lost.receive()
    for outcome in outcomes:
        assert not outcome.failed, str(outcome)
        assert re.search(r"ranks? (\d+, )*1\b", outcome.value), outcome.value
        assert "allreduce" in outcome.value
    return [outcome.value for outcome in outcomes]


def check_lost_rank(started, op):
    """Run operations until one fails because a rank is lost."""
    array = device().array(values("float32", (10_000,)))
    try:
        for step in itertools.count():
            hvd.allreduce(array, op=op)
            if step == 10 and hvd.rank() == 0:
                started.touch()
    except hvd.HorovodInternalError as error:
        return str(error)


# Processes keep their GPU for their lifetime. No other test has five GPUs, so its processes are separate.
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("hosts", "devices", "algorithm", "op"),
    [
        ("aa", 2, None, hvd.Sum),
        ("aa", 2, "staged", hvd.Sum),
        ("aa", 2, "nccl", hvd.Sum),
        ("aabb", 5, "hierarchical", hvd.Sum),
        ("aa", 2, "nccl", hvd.Adasum),
        ("aa", 2, "ipc", hvd.Adasum),
    ],
)
@pytest.mark.short("aa-2-None-1-*", failure=True)
def test_killed_or_stopped_rank_is_named(job, tmp_path, hosts, devices, algorithm, op, how):
    start_processes(job, hosts, devices, algorithm, op)
    with job(hosts, devices, algorithm, **quick()) as ranks:
        check_errors_name_the_lost_rank(ranks, how, check_lost_rank, tmp_path / "started", op)


def check_crossing_sets(started):
    """Each rank keeps operations on two process sets in flight, whose other members have operations on further sets,
    until one fails because a rank is lost."""
    rank, size = hvd.rank(), hvd.size()
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2]), hvd.add_process_set([2, 3])]
    pairs.append(hvd.add_process_set([0, 3]))
    mine = [pair for pair in pairs if pair.included()]
    if rank % 2:
        mine.reverse()
    array = device().array(values("float32", (10_000,)))
    try:
        for step in itertools.count():
            handles = [
                hvd.allreduce_async(array, process_set=pair, name=f"of {pair.ranks}")
                for pair in mine
            ]
            for handle in handles:
                hvd.synchronize(handle)
            if step == 10 and rank == size - 1:
                started.touch()
    except hvd.HorovodInternalError as error:
        return str(error)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("devices", "algorithm"), [(6, "nccl"), (6, "ipc"), (6, "staged")])
def test_killed_or_stopped_rank_of_overlapping_sets_is_named(
    job, tmp_path, devices, algorithm, how
):
    """All others get the error: those that share a set with the rank, and the one that does not."""
    start_processes(job, "aaaa", devices, algorithm)
    with job("aaaa", devices, algorithm, HOROVOD_DYNAMIC_PROCESS_SETS="1", **quick()) as ranks:
        check_errors_name_the_lost_rank(ranks, how, check_crossing_sets, tmp_path / "started")


def let_the_engine_poll_the_device():
    """Run host operations: the engine polls the device between them."""
    for _ in range(200):
        hvd.allreduce(np.ones(3), op=hvd.Sum, name="host")


def check_own_suspension(started, resumed):
    """An allreduce is in progress on the GPUs when the ranks are stopped, and continues afterwards."""
    mine = values("float32", (300,))
    array = device().array(mine)
    expected = hvd.allreduce(mine, op=hvd.Sum)
    equal(hvd.allreduce(array, op=hvd.Sum), expected)
    if hvd.rank() == 1:
        device().hold()
    result = hvd.allreduce(array, op=hvd.Sum)
    let_the_engine_poll_the_device()
    if hvd.rank() == 0:
        started.touch()
    until(resumed.exists, 60)
    let_the_engine_poll_the_device()
    if hvd.rank() == 1:
        device().resume()
    equal(result, expected)


def test_own_suspension_does_not_count_towards_the_timeout(job, tmp_path):
    started, resumed = tmp_path / "started", tmp_path / "resumed"
    limit = scaled(4)
    with job("aa", 2, "nccl", HOROVOD_GLOO_TIMEOUT_SECONDS=f"{limit:.1f}") as ranks:
        ranks.start(check_own_suspension, started, resumed)
        ranks.until(started.exists)
        for worker in ranks.workers:
            worker.process.send_signal(signal.SIGSTOP)
        time.sleep(limit + 1)  # longer than the timeout, as on a suspended machine
        resumed.touch()
        for worker in ranks.workers:
            worker.process.send_signal(signal.SIGCONT)
        outcomes = ranks.collect()
    assert [outcome.message for outcome in outcomes if outcome.failed] == []


def check_gpu_waits_for_stopped_rank(started):
    """Rank 0's GPU waits for rank 1's, which has not begun the operation when rank 1 is stopped."""
    array = device().array(values("float32", (300,)))
    on_host(hvd.allreduce(array))
    if hvd.rank() == 1:
        device().hold()
    try:
        hvd.allreduce(array, name="held up")
        let_the_engine_poll_the_device()
        if hvd.rank() == 1:
            started.touch()
        hvd.allreduce(np.ones(3), name=f"of rank {hvd.rank()} alone")
    except hvd.HorovodInternalError as error:
        return str(error)
    finally:
        device().resume()


def test_operation_waiting_on_the_gpu_names_the_stopped_rank(job, tmp_path):
    with job("aa", 2, "nccl", HOROVOD_GLOO_TIMEOUT_SECONDS=f"{scaled(2):.1f}") as ranks:
        messages = check_errors_name_the_lost_rank(
            ranks, signal.SIGSTOP, check_gpu_waits_for_stopped_rank, tmp_path / "started"
        )
    assert "'allreduce.held up' has not ended on the GPU" in messages[0]
    assert "waiting for rank 1, which does not answer" in messages[0]


def check_again():
    """After shutdown and init, operations work on the same GPU."""
    mine = values("float32", (50,))
    for _ in range(3):
        equal(hvd.allreduce(device().array(mine), op=hvd.Sum), hvd.allreduce(mine, op=hvd.Sum))
        hvd.shutdown()
        hvd.init()


def test_init_after_shutdown_on_the_same_gpu(job):
    with job("aa", 2) as ranks:
        ranks.run(check_again)


def check_two_devices():
    with pytest.raises(ValueError, match=r"cuda:1.*cuda:0"):
        hvd.allreduce(simulated_gpu.Device(1).array(np.ones(3)), name="x")


def test_second_gpu_is_refused(job):
    with job("a", 2) as ranks:
        ranks.run(
            lambda: device() and hvd.allreduce(device().array(np.ones(3)), name="first") and None
        )
        ranks.run(check_two_devices)
