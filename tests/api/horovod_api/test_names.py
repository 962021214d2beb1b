"""A name that is submitted twice without a wait in between is refused, however fast the first operation is done."""

import horovod.torch as hvd
import pytest
import torch

from tests.api.horovod_api.operations import SUBMIT


@pytest.mark.parametrize("kind", SUBMIT)
def test_second_submission_of_a_name_is_refused(kind):
    """In Horovod, a cycle is longer than the time between two calls, so the second one is always refused."""
    submit, tensor = SUBMIT[kind], torch.ones(17, 17)
    for _ in range(200):
        handle = submit(tensor, name="twice")
        with pytest.raises(ValueError, match="twice"):
            submit(tensor, name="twice")
        hvd.synchronize(handle)


def test_refused_call_leaves_the_name_free():
    with pytest.raises(ValueError, match=r"\S"):
        hvd.alltoall(torch.ones(hvd.size() + 1), name="second try")
    assert hvd.alltoall(torch.ones(hvd.size()), name="second try").shape == (hvd.size(),)


@pytest.mark.parametrize("way", ["synchronize", "poll", "barrier", "another", "failure"])
def test_name_is_free_after_a_wait(way):
    """The name is free after a wait for the operation or for a later one."""
    first = hvd.allreduce_async(torch.ones(1 + hvd.rank() * (way == "failure")), name="name")
    if way in ("synchronize", "poll"):
        while way == "poll" and not hvd.poll(first):
            pass
        hvd.synchronize(first)
    elif way == "failure":
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(first)
    elif way == "barrier":
        hvd.barrier()
        hvd.barrier()
    else:
        hvd.allgather_object(1)
        hvd.allgather_object(2)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="name") == hvd.size()
