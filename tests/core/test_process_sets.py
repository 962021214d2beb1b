"""Process sets: created by init and later, used in every operation, and invalid ones refused."""

import random

import numpy as np
import pytest
import torch

import horoplug.torch as hvd
from tests.harness.support import NO_LIMITS, Pool, ranks_fixture, seed

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aaa", "aab", "abc")


@pytest.mark.short
def test_process_sets_passed_to_init(pool):
    def run():
        even, first = hvd.ProcessSet([2, 0]), hvd.ProcessSet([0])
        unregistered = even.size(), even.rank(), even.included()
        hvd.init(process_sets=[even, first, [1, 2]])
        members = [(each.process_set_id, each.size(), each.rank()) for each in (even, first)]
        total = hvd.allreduce(torch.ones(2), process_set=even, op=hvd.Sum) if even.included() else 0
        hvd.barrier()
        hvd.shutdown()
        after = even.process_set_id, first.included()
        hvd.init()  # without process sets
        return unregistered, members, total, after

    with pool.ranks(3, init=False) as job:
        for rank, (unregistered, members, total, after) in enumerate(job.run(run)):
            assert unregistered == (None, None, None)
            assert members == [(1, 2, [0, None, 1][rank]), (2, 1, [0, None, None][rank])]
            assert total == 0 if rank == 1 else total.tolist() == [2, 2]
            assert after == (None, None)


def test_process_sets_passed_to_init_must_agree_on_all_ranks(pool):
    def run(rank):
        sets = [[0, 1]] if rank < 2 else [[0, 1], [1, 2]]
        try:
            hvd.init(process_sets=sets)
        except ValueError as error:
            message = str(error)
        assert not hvd.is_initialized()
        hvd.init(process_sets=[[0, 1]])
        return message

    with pool.ranks(3, init=False) as job:
        job.start(lambda: run(int(__import__("os").environ["HOROVOD_RANK"])))
        for outcome in job.collect():
            assert not outcome.failed, outcome
            assert "process sets of init() is" in outcome.value
            assert "[0, 1], [1, 2] on rank 2" in outcome.value


def test_invalid_process_set_arguments_are_refused(pool):
    def run():
        for arguments, words in (
            ({"process_sets": [[0], [1], [0]]}, "entry number 2 is a duplicate"),
            ({"process_sets": "static"}, "'static'"),
            ({"process_sets": 3}, "got int"),
            ({"process_sets": [["a"]]}, "integers"),
            ({"process_sets": [[0, 9]]}, "ranks 0, 9: rank 9 does not exist"),
            ({"process_sets": [[0, 1]]}, r"process set 0 already has the ranks \[0, 1\]"),
            ({"comm": [0, 9]}, "0 to 1"),
            ({"comm": ["x"]}, "list of ranks"),
        ):
            with pytest.raises(ValueError, match=words):
                hvd.init(**arguments)
            assert not hvd.is_initialized()

    with pool.ranks(2, init=False) as job:
        job.run(run)


@pytest.mark.short
def test_process_sets_are_added_and_removed_repeatedly(ranks):
    def run():
        me = hvd.rank()
        for _ in range(30):
            a = hvd.add_process_set([2, 1])
            b = hvd.add_process_set(hvd.ProcessSet(range(2)))
            assert a.ranks == [1, 2]
            if me in (1, 2):
                assert hvd.allreduce(torch.tensor(me), op=hvd.Sum, process_set=a) == 3
            if me in (0, 1):
                assert hvd.allreduce(torch.tensor(me), op=hvd.Sum, process_set=b) == 1
            with pytest.raises(ValueError, match="already"):
                hvd.add_process_set([1, 2])
            with pytest.raises(ValueError, match="already"):
                hvd.add_process_set([0, 1, 2])
            assert hvd.remove_process_set(b)
            assert not hvd.remove_process_set(b)
            assert hvd.remove_process_set(a)
            assert a.process_set_id is None
            with pytest.raises(ValueError, match="not registered"):
                hvd.allreduce(torch.ones(1), process_set=a)
        assert not hvd.remove_process_set(hvd.global_process_set)
        assert hvd.allreduce(torch.tensor(1), op=hvd.Sum) == 3

    ranks.run(run)


@pytest.mark.short
def test_every_operation_in_a_set(ranks):
    def run():
        members = hvd.add_process_set([0, 2])
        me = hvd.rank()
        if me == 1:
            with pytest.raises(ValueError, match="rank 1 is not in process set"):
                hvd.allreduce(torch.ones(1), process_set=members)
        else:
            place = members.rank()
            x = torch.full((4, 2), float(me), requires_grad=True)
            average = hvd.allreduce(x, process_set=members)
            assert average.eq(1).all()
            y = torch.ones(2)
            hvd.allreduce_(y, op=hvd.Sum, process_set=members)
            assert y.eq(2).all()
            a, b = hvd.grouped_allreduce([y, y], op=hvd.Sum, process_set=members)
            assert a.eq(4).all()
            assert b.eq(4).all()
            rows = hvd.allgather(torch.full((me + 1,), me), process_set=members)
            assert rows.tolist() == [0, 2, 2, 2]
            assert hvd.broadcast(torch.tensor([me]), 2, process_set=members).tolist() == [2]
            with pytest.raises(ValueError, match="root rank 1"):
                hvd.broadcast(torch.tensor([me]), 1, process_set=members)
            out, received = hvd.alltoall(torch.full((3,), me), [1, 2], process_set=members)
            assert received.tolist() == [[1, 1], [2, 2]][place]
            assert out.tolist() == [[0, 2], [0, 0, 2, 2]][place]
            part = hvd.reducescatter(torch.ones(3, 2), op=hvd.Sum, process_set=members)
            assert part.shape == ([2, 1][place], 2)
            assert part.eq(2).all()
            hvd.barrier(process_set=members)
            assert hvd.broadcast_object({"rank": me}, 2, process_set=members) == {"rank": 2}
            assert hvd.allgather_object(me, process_set=members) == [0, 2]
            layer = torch.nn.Linear(2, 2)
            torch.nn.init.constant_(layer.weight, me)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1 * (me + 1), momentum=0.9)
            hvd.broadcast_parameters(layer.state_dict(), 2, process_set=members)
            hvd.broadcast_optimizer_state(optimizer, 2, process_set=members)
            assert layer.weight.eq(2).all()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
            # Gradients use the set's ranks.
            z = torch.full((me + 1, 2), 1.0, requires_grad=True)
            gathered = hvd.allgather(z, process_set=members)
            gathered.mul(torch.arange(8.0).view(4, 2)).sum().backward()
            expected = (
                torch.arange(8.0).view(4, 2)[:1] if place == 0 else torch.arange(8.0).view(4, 2)[1:]
            )
            assert z.grad.equal(expected)
            w = torch.ones(4, requires_grad=True)
            hvd.reducescatter(w, op=hvd.Sum, process_set=members).sum().backward()
            assert w.grad.eq(2).all()
        hvd.remove_process_set(members)

    ranks.run(run)


def test_overlapping_sets_operate_in_any_order(ranks):
    number = seed()

    def run():
        sets = [hvd.global_process_set, *map(hvd.add_process_set, ([0, 1], [1, 2], [0, 2], [1]))]
        mine = [(each, i) for each in sets if each.included() for i in range(20)]
        order = random.Random(number + hvd.rank())
        for _ in range(3):
            order.shuffle(mine)
            handles = [
                (
                    each,
                    hvd.allreduce_async(
                        torch.ones(50 * i + 1), op=hvd.Sum, name=str(i), process_set=each
                    ),
                )
                for each, i in mine
            ]
            order.shuffle(handles)
            for each, handle in handles:
                assert hvd.synchronize(handle).eq(each.size()).all()
        for each in sets[1:]:
            hvd.remove_process_set(each)

    ranks.run(run)


@pytest.mark.short(failure=True)
def test_mismatched_sets_are_an_error_on_every_rank(ranks):
    def run():
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.add_process_set([0, 1] if hvd.rank() < 2 else [0, 2])
        known = hvd.allreduce(torch.tensor(1), op=hvd.Sum)
        return str(caught.value), known

    for message, known in ranks.run(run):
        assert "[0, 1] on ranks 0, 1" in message
        assert "[0, 2] on rank 2" in message
        assert known == 3


def test_subset_of_processes_can_be_a_separate_job(pool):
    def run(rank):
        for _ in range(3):
            hvd.init(comm=[2, 0] if rank != 1 else [1])
            position = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
            assert position == {0: (1, 2, 1, 2), 1: (0, 1, 0, 1), 2: (0, 2, 0, 2)}[rank]
            total = hvd.allreduce(torch.tensor(rank), op=hvd.Sum)
            assert total == (1 if rank == 1 else 2)
            assert hvd.broadcast(torch.tensor(rank), 0) == (1 if rank == 1 else 2)
            hvd.shutdown()
        with pytest.raises(ValueError, match="not in the list"):
            hvd.init(comm=[(rank + 1) % 3])
        hvd.init()
        assert hvd.allreduce(torch.tensor(rank), op=hvd.Sum) == 3

    with pool.ranks(3, init=False) as job:
        job.run(lambda: run(int(__import__("os").environ["HOROVOD_RANK"])))


def test_process_set_of_one_rank_in_numpy(pool: Pool):
    def run():
        import horoplug as numpy_hvd

        alone = numpy_hvd.add_process_set([numpy_hvd.size() - 1])
        result = None
        if alone.included():
            result = numpy_hvd.allreduce(np.arange(3.0), process_set=alone).tolist()
        return result

    with pool.ranks(2) as job:
        assert job.run(run) == [None, [0.0, 1.0, 2.0]]


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
@pytest.mark.parametrize("waiting", [0, 2])
def test_pending_operation_ends_when_a_rank_outside_of_its_set_leaves(pool: Pool, hosts, waiting):
    """The other rank of the set hears of the leaving before it submits the operation, and cannot do so any more."""

    def run():
        rest = hvd.add_process_set([0, 2])
        handle = None
        if hvd.rank() == waiting:
            handle = hvd.allreduce_async(torch.ones(2), name="x", process_set=rest)
        hvd.barrier()
        if hvd.rank() == 1:
            return hvd.shutdown()
        with pytest.raises(hvd.HorovodInternalError) as error:
            hvd.synchronize(handle) if handle else hvd.allreduce(torch.ones(2), name="of all")
        return str(error.value)

    with pool.ranks(3, hosts=hosts, env=NO_LIMITS) as job:
        texts = job.run(run, timeout=60)
        assert all("rank 1 has shut down" in texts[rank] for rank in (0, 2)), texts
