"""Shared buffers from Python: tensors are reduced in place, and the memory outlives the job."""

import gc

import numpy as np
import pytest
import torch

import horoplug.torch as hvd
from horoplug.common.buffers import SharedBuffer
from tests.harness.support import ranks_fixture

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aaa", "aab")  # with shared memory, and without


@pytest.mark.short
def test_tensors_in_a_shared_buffer_are_reduced(ranks):
    def run():
        buffer = SharedBuffer(4_000_000)
        whole = torch.frombuffer(buffer.view(), dtype=torch.float32)
        assert len(whole) == 1_000_000
        assert not whole.any()
        assert buffer.address % 4096 == 0
        results = []
        for begin, count in ((0, 10), (1_000, 5_000), (7, 900_000)):
            part = whole[begin : begin + count]
            part.copy_(torch.arange(count) % 1000 + hvd.rank())
            hvd.allreduce_(part, op=hvd.Average, name="part")
            mean = torch.arange(count) % 1000 + (hvd.size() - 1) / 2
            results.append(bool(torch.equal(part, mean.float())))
        return results

    for results in ranks.run(run):
        assert results == [True] * 3


def test_views_outlive_the_buffer_and_the_job(pool):
    def run():
        hvd.init()
        buffer = SharedBuffer(100_000)
        array = np.frombuffer(buffer.view(), dtype=np.uint8)
        buffer.close()
        buffer.close()
        assert buffer.closed
        with pytest.raises(ValueError, match="closed"):
            buffer.view()
        array[:] = hvd.rank() + 1
        hvd.barrier()
        hvd.shutdown()
        gc.collect()
        kept = np.unique(array).tolist()
        array[:] = 7  # still writable
        with pytest.raises(ValueError, match="init"):
            SharedBuffer(10)
        return kept

    with pool.ranks(2, init=False) as job:
        assert job.run(run) == [[1], [2]]


@pytest.mark.short(failure=True)
def test_shared_buffer_sizes_must_agree_on_all_ranks(ranks):
    def run():
        with pytest.raises(ValueError, match="positive"):
            SharedBuffer(0)
        try:
            SharedBuffer(1000 + hvd.rank())
        except hvd.HorovodInternalError as error:
            return str(error)

    for message in ranks.run(run):
        for word in ("buffer size", "1000", "1001"):
            assert word in message
