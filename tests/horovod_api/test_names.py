"""A name that is submitted twice without a wait in between is refused, however fast the first operation is done."""

import horovod.torch as hvd
import pytest
import torch
from test_handles import SUBMIT


@pytest.mark.parametrize("kind", SUBMIT)
def test_always(kind):
    """Horovod's users rely on it: one of its cycles is longer than the time between two lines of a program."""
    submit, tensor = SUBMIT[kind], torch.ones(17, 17)
    for _ in range(200):
        handle = submit(tensor, name="twice")
        with pytest.raises(ValueError, match="twice"):
            submit(tensor, name="twice")
        hvd.synchronize(handle)
