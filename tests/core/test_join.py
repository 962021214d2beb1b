"""join(): ranks that run out of data before the others."""

import itertools
import random

import numpy as np
import pytest
import torch

import horoplug.torch as hvd
from tests.harness.support import ranks_fixture, seed

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aa", "aaa", "aab", "abcd")


def test_reductions_ignore_joined_ranks(ranks):
    def run(first):
        me, size = hvd.rank(), hvd.size()
        present = [r for r in range(size) if r != first]
        if me == first:
            return hvd.join()
        for dtype in (
            torch.uint8,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
        ):
            for shape in ((), (5,), (3, 4, 5), (100, 100)):
                x = torch.full(shape, me + 1, dtype=dtype)
                values = [r + 1 for r in present]
                for op, expected in (
                    (hvd.Sum, sum(values)),
                    (hvd.Min, min(values)),
                    (hvd.Max, max(values)),
                    (hvd.Product, int(np.prod(values))),
                ):
                    assert hvd.allreduce(x, op=op).eq(expected).all()
        x = torch.full((4,), 8.0)
        assert (
            hvd.allreduce(x).eq(8.0 * (size - 1) / size).all()
        )  # divided by the number of all ranks, as in Horovod
        doubled = hvd.allreduce(x, op=hvd.Max, prescale_factor=-1.0, postscale_factor=2.0)
        assert doubled.eq(-16).all()
        if size != 3:  # Adasum needs 2^n ranks; for equal tensors it is their average
            assert hvd.allreduce(torch.full((5,), 3.0), op=hvd.Adasum).eq(3).all()
        flags = torch.tensor([True, False])
        assert hvd.allreduce(flags, op=hvd.Min).equal(flags)
        assert hvd.allreduce(flags, op=hvd.Max).equal(flags)
        return hvd.join()

    for first in range(2):
        last = ranks.run(run, first)
        assert len(set(last)) == 1
        assert last[0] != first


def test_other_operations_after_a_rank_has_joined(ranks):
    def run():
        me, size = hvd.rank(), hvd.size()
        if me == 0:
            return hvd.join()
        gathered = hvd.allgather(torch.full((me,), me))
        assert gathered.tolist() == [r for r in range(1, size) for _ in range(r)]
        assert hvd.broadcast(torch.tensor([me]), size - 1).tolist() == [size - 1]
        with pytest.raises(hvd.HorovodInternalError, match="root, rank 0, has joined"):
            hvd.broadcast(torch.tensor([me]), 0, name="lost")
        out, received = hvd.alltoall(torch.full((size - 1,), me), [0] + [1] * (size - 1))
        assert out.tolist() == list(range(1, size))
        assert received.tolist() == [0] + [1] * (size - 1)
        with pytest.raises(hvd.HorovodInternalError, match="would send rows to rank 0"):
            hvd.alltoall(torch.ones(size))
        part = hvd.reducescatter(torch.ones(2 * size + 1, 3), op=hvd.Sum)
        assert part.shape == (2, 3)
        assert part.eq(size - 1).all()
        hvd.barrier()
        assert hvd.allgather_object(me) == list(range(1, size))
        with pytest.raises(hvd.HorovodInternalError, match="has joined"):
            hvd.add_process_set([0])
        return hvd.join()

    assert len(set(ranks.run(run))) == 1


@pytest.mark.short("aa")
def test_uneven_data_step_by_step(ranks):
    number = seed()

    def run(steps):
        lasts = []
        for epoch in steps:
            for step in range(epoch[hvd.rank()]):
                active = sum(count > step for count in epoch)
                handles = [
                    hvd.allreduce_async(torch.ones(10 * i + 1), name=f"g{i}", op=hvd.Sum)
                    for i in range(10)
                ]
                assert all(hvd.synchronize(h).eq(active).all() for h in handles)
                assert hvd.allreduce(torch.tensor(1), op=hvd.Sum) == active  # unnamed
            lasts.append(hvd.join())
        return lasts

    choose = random.Random(number)
    steps = [[choose.randrange(6) for _ in range(ranks.size)] for _ in range(5)]
    lasts = ranks.run(run, steps)
    assert all(each == lasts[0] for each in lasts)
    for epoch, last in zip(steps, lasts[0], strict=True):
        assert epoch[last] == max(epoch) or max(epoch) == 0


@pytest.mark.short("aa")
def test_distributed_optimizer_with_uneven_data(ranks):
    def run():
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 1, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
        for step in range(2 + hvd.rank()):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + step, dtype=torch.float64)).sum().backward()
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), last)
        return model.weight.tolist()

    expected = None
    results = ranks.run(run)
    torch.manual_seed(1)
    weight = torch.nn.Linear(3, 1, dtype=torch.float64).weight.detach()
    for step in range(2 + ranks.size - 1):
        active = sum(2 + rank > step for rank in range(ranks.size))
        weight = weight - 0.1 * 2 * (1.0 + step) * active
    expected = weight.tolist()
    for each in results:
        for a, b in zip(itertools.chain(*each), itertools.chain(*expected), strict=True):
            assert a == pytest.approx(b)


def test_join_in_a_process_set(ranks):
    def run():
        pair = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.global_process_set
        last = None
        if pair.included():
            if hvd.rank() == 1:
                assert hvd.allreduce(torch.tensor(5), op=hvd.Min, process_set=pair) == 5
            last = hvd.join(process_set=pair)
        total = hvd.allreduce(torch.tensor(1), op=hvd.Sum)
        hvd.remove_process_set(pair)
        return last, total

    results = ranks.run(run)
    assert [last for last, _ in results[:2]] == [1, 1]
    assert all(total == ranks.size for _, total in results)
