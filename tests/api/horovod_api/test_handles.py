"""Handles, names that are in flight, and barriers."""

import tempfile
import time
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch

from tests.api.horovod_api.matrix import equal
from tests.api.horovod_api.operations import SUBMIT


@pytest.mark.parametrize("kind", SUBMIT)
def test_name_in_flight_is_refused(kind):
    """The call raises ValueError at once, and the operation with the name is unaffected. Only rank 0 submits, since an
    operation that every rank has submitted may be done before the second call."""
    submit, tensor = SUBMIT[kind], torch.ones(17, 17)
    if hvd.rank() == 0:
        handle = submit(tensor, name="duplicate_name")
        with pytest.raises(ValueError, match="duplicate_name"):
            submit(tensor, name="duplicate_name")
    hvd.barrier()
    if hvd.rank() > 0:
        handle = submit(tensor, name="duplicate_name")
    assert hvd.synchronize(handle) is not None
    assert hvd.synchronize(submit(torch.ones(17, 17), name="duplicate_name")) is not None


def test_shutdown_with_unmatched_operations_in_flight():
    """Operations that only one rank has submitted are in flight when ``job`` shuts down."""
    if hvd.rank() == 0:
        hvd.allreduce_async(torch.ones(3), name="nobody else")
    hvd.broadcast_async(torch.eye(3), root_rank=0)
    hvd.allgather_async(torch.eye(5))


def test_refused_calls_do_not_shift_automatic_names():
    """A refused call on one rank must not change the automatic names of later calls."""
    if hvd.rank() == 0:
        for _ in range(3):
            with pytest.raises(ValueError, match="float8_e4m3fnuz"):
                hvd.allreduce(torch.ones(4, dtype=torch.float8_e4m3fnuz))
        hvd.allreduce_async(torch.ones(1), name="taken")
        with pytest.raises(ValueError, match="taken"):
            hvd.allreduce_async(torch.ones(1), name="taken")
    for n in range(3):
        assert hvd.allreduce(torch.tensor([n]), op=hvd.Sum) == n * hvd.size()


def test_synchronize_of_unknown_handles_returns_none():
    """Horovod returns None for a handle that is unknown or was synchronised."""
    assert hvd.synchronize(123456789) is None
    handle = hvd.allreduce_async(torch.ones(2))
    assert hvd.synchronize(handle) is not None
    assert hvd.synchronize(handle) is None


def test_poll_becomes_true():
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    deadline = time.monotonic() + 60
    while not hvd.poll(handle):
        assert time.monotonic() < deadline
    equal(hvd.synchronize(handle), torch.full((2,), float(hvd.size())))


def test_poll_of_a_failed_operation_is_true():
    """A failed operation is done; synchronize raises its error."""
    handle = hvd.allreduce_async(torch.ones(2 + hvd.rank()), name="failure")
    deadline = time.monotonic() + 60
    while not hvd.poll(handle):
        assert time.monotonic() < deadline
    with pytest.raises(hvd.HorovodInternalError):
        hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None


def test_tensors_of_a_handle_are_kept_alive():
    handles = [
        hvd.allreduce_async(torch.full((1000,), float(n)), op=hvd.Sum, name=f"n{n}")
        for n in range(50)
    ]
    for n, handle in enumerate(handles):
        equal(hvd.synchronize(handle), torch.full((1000,), float(n * hvd.size())))


def test_barrier_waits_for_every_rank():
    """No rank leaves the barrier before the last one has entered it, so all see the file of the last one."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(hvd.broadcast_object(made, 0))
        last = folder / "0"
        if hvd.rank() == 0:  # enters when all others are waiting or about to wait
            deadline = time.monotonic() + 60
            while len(list(folder.iterdir())) < hvd.size() - 1:
                assert time.monotonic() < deadline
            last.touch()
        else:
            (folder / str(hvd.rank())).touch()
        hvd.barrier()
        assert last.exists()
        hvd.barrier()  # before rank 0 removes it


def test_barrier_among_other_operations():
    sent = hvd.broadcast_async(torch.eye(3), root_rank=0)
    gathered = [hvd.allgather_async(torch.eye(5)), hvd.allgather_async(torch.zeros(5, 5))]
    reduced = hvd.allreduce_async(torch.eye(5))
    hvd.barrier()
    torch.testing.assert_close(hvd.synchronize(reduced), torch.eye(5), rtol=1e-6, atol=0)
    equal(hvd.synchronize(sent), torch.eye(3))
    assert [hvd.synchronize(handle).shape[0] for handle in gathered] == [5 * hvd.size()] * 2


def test_barrier_takes_a_process_set():
    hvd.barrier(hvd.global_process_set)
    hvd.barrier(process_set=hvd.global_process_set)
