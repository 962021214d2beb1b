"""Process groups: how they begin and end, subgroups, works and futures, other backends beside horoplug."""

import operator
import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import horoplug.torch.c10d
from tests.harness.limits import scaled
from tests.harness.process_groups import SECONDS, begin, end, new_file, process_groups
from tests.harness.support import process_state, resources, until

pytest_plugins = ["tests.harness.jobs"]

groups = process_groups("aab")


def total(group=None):
    """The sum of 2^rank over a group, which tells its members."""
    tensor = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return int(tensor)


# ---- works ----------------------------------------------------------------------------------------------------------


def futures():
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda each: each.value()[0] * 2)
    assert doubled.wait().tolist() == [2 * size] * 3
    assert future.value()[0] is tensor
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result() == [tensor]
    assert work.wait(timedelta(seconds=5))

    # A future that is asked for after the end, of each kind of operation.
    outputs = [torch.zeros(2) for _ in range(size)]
    work = dist.all_gather(outputs, torch.full([2], float(rank)), async_op=True)
    work.wait()
    assert [each[0].item() for each in work.get_future().wait()] == list(range(size))

    # Futures whose works are dropped. Operations of a future's callback run in another thread.
    second = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    chained = second.then(lambda each: dist.get_world_size() + each.value()[0].item())
    assert chained.wait() == 2 * size
    assert dist.barrier(async_op=True).get_future().wait() == []


def test_futures(groups):
    groups.run(futures)


def waiting():
    """A wait that times out ends only the wait: the operation goes on."""
    tensor = torch.zeros(1)
    if dist.get_rank() == 0:
        work = dist.irecv(tensor, 2, tag=3)
        assert not work.is_completed()
        assert not work.is_success()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"not done after 0\.05 s"):
            work.wait(timedelta(milliseconds=50))
        assert time.monotonic() - began < scaled(10)
        total()
        assert work.wait()
        assert tensor.item() == 5
        assert work._source_rank() == 2
    else:
        total()
        if dist.get_rank() == 2:
            dist.send(torch.tensor([5.0]), 0, tag=3)


def test_time_limit_of_one_wait(groups):
    groups.run(waiting)


def many_threads():
    """Transfers in several threads at the same time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []

    def transfer(tag):
        tensor = torch.zeros(100)
        for step in range(20):
            work = dist.isend(torch.full([100], float(step)), (rank + 1) % size, tag=tag)
            dist.recv(tensor, (rank - 1) % size, tag=tag)
            work.wait()
            if tensor.unique().tolist() != [step]:
                wrong.append((tag, step, tensor))

    threads = [threading.Thread(target=transfer, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(60))
    assert not wrong


def test_threads_share_a_group(groups):
    groups.run(many_threads)


# ---- several groups -------------------------------------------------------------------------------------------------


def subgroups():
    rank = dist.get_rank()
    world = dist.distributed_c10d._world
    count = world.group_count
    if rank < 2:  # only the members call
        local = dist.new_group([0, 1], use_local_synchronization=True)
        assert total(local) == 3
        dist.destroy_process_group(local)
    # PyTorch 2.14 names groups by their number and counts this one on its members only. The names of later groups would
    # differ between ranks, on every backend.
    world.group_count = count
    first, last = dist.new_group([0, 1]), dist.new_group([2, 1])
    if rank != 2:
        assert dist.get_backend(first) == "horoplug"
        assert total(first) == 3
        assert dist.get_rank(first) == rank
    if rank != 0:
        assert total(last) == 6
        assert dist.get_process_group_ranks(last) == [1, 2]
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, group_src=1, group=last)
        assert tensor.item() == dist.get_global_rank(last, 1)
    # Groups in which ranks wait for each other in different orders do not block each other.
    works = []
    order = [first, last] if rank == 1 else [last, first]
    tensors = [torch.ones(1), torch.ones(1)]
    for group, tensor in zip(order, tensors, strict=True):
        if rank in dist.get_process_group_ranks(group):
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for work in works:
        work.wait()
    assert total() == 7
    for group in (first, last):
        if rank in dist.get_process_group_ranks(group):
            dist.destroy_process_group(group)
    by_host, mine = dist.new_subgroups_by_enumeration([[0, 2], [1]])
    assert total(by_host) == (2 if rank == 1 else 5)
    assert len(mine) == 2
    dist.destroy_process_group(by_host)


@pytest.mark.short
def test_subgroups(groups):
    groups.run(subgroups)


def meshes():
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("outer", "inner"))
    assert total(mesh.get_group("inner")) == 7
    assert total(mesh.get_group("outer")) == 2 ** dist.get_rank()
    assert mesh["inner"].size() == size
    assert dist.get_backend(mesh.get_group("inner")) == "horoplug"
    with pytest.raises(RuntimeError) as caught:
        dist.split_group(split_ranks=[[0, 1], [2]])
    assert "\n" not in str(caught.value)


@pytest.mark.short
def test_device_mesh(groups):
    groups.run(meshes)


def description():
    group = dist.group.WORLD
    assert isinstance(group, horoplug.torch.c10d.ProcessGroup)
    assert group.name() == "horoplug"
    assert dist.get_backend() == "horoplug"
    assert repr(group) == f"<horoplug process group: rank {dist.get_rank()}, size 3>"
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
    assert dist.get_backend_config() == "cpu:horoplug,cuda:horoplug"


def test_description(groups):
    groups.run(description)


def timeouts():
    """One rank does not come: all others get an error after the time limit of the group."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="rank 1") as caught:
            dist.all_reduce(torch.ones(1), group=group)
        assert "\n" not in str(caught.value)
        assert "the argument timeout of init_process_group or new_group" in str(caught.value)
        assert "HORO" not in str(caught.value)
        assert 0.5 < time.monotonic() - began < SECONDS / 2
    assert total() == 7  # other groups are not affected


def overloads():
    """Methods of the group, with a reduction or a root in place of options, and without."""
    rank, group = dist.get_rank(), dist.group.WORLD
    for op, expected in ((dist.ReduceOp.MAX, 3.0), (dist.ReduceOp.SUM, 6.0), (None, 6.0)):
        tensor = torch.tensor([rank + 1.0])
        group.allreduce([tensor], *([] if op is None else [op])).wait()
        assert tensor.item() == expected
    for root in (2, None):
        tensor = torch.tensor([rank + 1.0])
        group.broadcast([tensor], *([] if root is None else [root])).wait()
        assert tensor.item() == (root or 0) + 1


def test_overloads(groups):
    groups.run(overloads)


def split():
    """The method that torch.distributed.split_group calls on groups with an accelerator."""
    rank = dist.get_rank()
    for number in range(2):
        group = dist.group.WORLD.split_group([2, 0], timeout=timedelta(seconds=SECONDS))
        if rank == 1:
            assert group is None
            continue
        assert (group.rank(), group.size()) == ({2: 0, 0: 1}[rank], 2)
        assert group.group_name.endswith(f":split:{dist.group.WORLD._splits}")
        tensor = torch.tensor([2.0**rank])
        group.allreduce([tensor]).wait()
        assert int(tensor) == 5
        alone = group.split_group([group.rank()], group_name=f"alone-{number}-{rank}")
        assert (alone.size(), alone.group_name) == (1, f"alone-{number}-{rank}")
        alone.shutdown()
        group.shutdown()
    assert total() == 7


def test_split(groups):
    groups.run(split)


def test_time_limit_of_a_group(groups):
    groups.run(timeouts)


def barrier_that_names_ranks(wait_all):
    group = dist.new_group(timeout=timedelta(seconds=20))
    dist.monitored_barrier(group)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.monitored_barrier(group, timedelta(seconds=0.5), wait_all)
        expected = "Ranks 1, 2 failed" if wait_all else "Rank 1 failed"
        assert f"{expected} to pass monitoredBarrier in 500 ms" in str(caught.value)
        with pytest.raises(RuntimeError, match="to pass monitoredBarrier in 100 ms"):
            group.monitored_barrier(0.1, wait_all)  # as PyTorch 2.1 passes on seconds
    dist.barrier()


def stand_in(file):
    """In place of Gloo, also where the name decides, as in monitored_barrier."""
    end()
    horoplug.torch.c10d.replace_gloo()
    try:
        begin(file, "gloo")
        assert "horoplug" in type(dist.group.WORLD).__module__
        assert dist.get_backend() == "gloo"
        assert total() == 7
        barrier_that_names_ranks(False)
        barrier_that_names_ranks(True)
        end()
    finally:
        horoplug.torch.c10d.replace_gloo(False)
    assert dist.ProcessGroupGloo.__module__.startswith("torch")


@pytest.mark.short
def test_stand_in_for_gloo(groups, tmp_path):
    groups.run(stand_in, new_file(tmp_path))
    groups.run(begin, new_file(tmp_path))


def delegation(file):
    """Each device has a backend of its own."""
    end()
    begin(file, "cpu:gloo,cuda:horoplug")
    group = dist.group.WORLD
    assert total() == 7
    assert type(group._get_backend(torch.device("cpu"))) is dist.ProcessGroupGloo
    assert group._get_backend(torch.device("cuda")) is group
    outputs = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(outputs, torch.tensor([float(dist.get_rank())]))
    assert [each.item() for each in outputs] == [0, 1, 2]
    dist.barrier()
    end()
    begin(f"{file}-reversed", "cpu:horoplug,cuda:gloo")
    assert total() == 7
    assert dist.group.WORLD._get_backend(torch.device("cpu")) is dist.group.WORLD
    end()


def test_other_backends_beside_horoplug(groups, tmp_path):
    groups.run(delegation, new_file(tmp_path))
    groups.run(begin, new_file(tmp_path))


# ---- stores, beginning and end --------------------------------------------------------------------------------------


def with_tcp_store(port):
    rank, size = dist.get_rank(), dist.get_world_size()
    end()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("horoplug", timeout=timedelta(seconds=SECONDS))
    assert total() == 7
    end()


def test_tcp_store_of_the_environment(groups, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    groups.run(with_tcp_store, port)
    groups.run(begin, new_file(tmp_path))


def test_hash_store_connects_threads_of_one_process():
    store, size = dist.HashStore(), 3
    results = [None] * size

    def run(rank):
        group = horoplug.torch.c10d.ProcessGroup(store, rank, size, timedelta(seconds=SECONDS))
        tensor = torch.tensor([float(rank)])
        group.allreduce([tensor]).wait()
        results[rank] = tensor.item()
        group.barrier().wait()
        group.shutdown()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert results == [3.0] * size


def end_and_begin_again(folder):
    end()
    before = None
    for number in range(100):
        begin(f"{folder}/again-{number}")
        assert total() == 7
        end()  # while others may still complete their part of the operation
        if number == 20:
            before = resources()
    # Descriptors, threads, segments. The last group's threads may still be ending.
    until(lambda: all(map(operator.le, resources()[:3], before[:3])))
    assert resources()[3] - before[3] < 8 * 1024


def test_end_and_begin_again(groups, tmp_path):
    groups.run(end_and_begin_again, str(tmp_path))
    groups.run(begin, new_file(tmp_path))


def fork():
    """A child has no part in the groups, and its end does not end them."""
    total()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            dist.group.WORLD.shutdown()
            dist.all_reduce(torch.ones(1))
        except BaseException as error:
            status = 0 if "\n" not in str(error) else 2
        finally:
            os._exit(status)
    until(lambda: process_state(child) == "Z", 20)
    assert os.waitpid(child, 0)[1] == 0
    assert total() == 7


def test_fork(groups):
    groups.run(fork, timeout=60)
