"""Groups whose members change: processes leave, die and come back."""

import os
import signal
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from horoplug.torch.c10d import ProcessGroup
from tests.harness.process_groups import SECONDS, new_file

pytest_plugins = ["tests.harness.jobs"]

LIMIT = timedelta(seconds=SECONDS)


def options(uuid, handles, timeout=None):
    """Has the attributes of PyTorch's ReconfigureOptions, which exists from 2.14 on."""
    return SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={})


def handles_of(store, members, key, group):
    """The handles of the members; every one of them calls."""
    rank = int(os.environ["HOROVOD_RANK"])
    store.set(f"{key}/{rank}", group.get_reconfigure_handle())
    keys = [f"{key}/{member}" for member in members]
    store.wait(keys, LIMIT)
    return [store.get(each).decode() for each in keys]


def total(group):
    tensor = torch.tensor([2.0 ** int(os.environ["HOROVOD_RANK"])])
    group.allreduce([tensor]).wait()
    return int(tensor)


def unconnected():
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    return ProcessGroup(None, rank, size, LIMIT, enable_reconfigure=True)


def change_members(file):
    rank = int(os.environ["HOROVOD_RANK"])
    store = dist.FileStore(file, -1)
    group = unconnected()
    assert group.supports_reconfigure
    with pytest.raises(RuntimeError, match=r"call reconfigure\(\)"):
        group.allreduce([torch.ones(1)])
    for uuid, members in enumerate(([0, 1, 2], [2, 0], [1, 2, 0])):
        if rank in members:
            pending = group.recv([torch.zeros(1)], 1, 7) if (uuid, rank) == (1, 0) else None
            handles = handles_of(store, members, uuid, group)
            assert handles[members.index(rank)] == group.get_reconfigure_handle()
            work = group.reconfigure(options(uuid, handles))
            if pending is not None:
                with pytest.raises(dist.DistBackendError):
                    pending.wait(LIMIT / 10)
                assert pending.exception() is not None
            assert work.is_completed()
            assert work.wait()
            assert (group.rank(), group.size()) == (members.index(rank), len(members))
            assert (group.getRank(), group.getSize()) == (group.rank(), group.size())
            assert total(group) == sum(2**member for member in members)
    # The ranks of a set are those of the sorted handles.
    handles = handles_of(store, range(3), "set", group)
    group.reconfigure(options(9, set(handles)))
    assert group.rank() == sorted(handles).index(group.get_reconfigure_handle())
    assert total(group) == 7
    group.shutdown()


def test_members_change(pool, tmp_path):
    with pool.ranks(3, init=False) as ranks:
        ranks.run(change_members, new_file(tmp_path))


def lose_a_member(file):
    """The survivors go on, and then a new process joins them: here, the same one with another group."""
    rank = int(os.environ["HOROVOD_RANK"])
    store = dist.FileStore(file, -1)
    group = unconnected()
    group.reconfigure(options(1, handles_of(store, range(3), "all", group)))
    assert total(group) == 7
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        total(group)
    group.reconfigure(options(2, handles_of(store, [0, 2], "left", group)))
    assert total(group) == 5
    joined = group if rank == 0 else unconnected()
    if rank == 2:
        group.shutdown()
    joined.reconfigure(options(3, handles_of(store, [2, 0], "joined", joined)))
    assert joined.rank() == (0 if rank == 2 else 1)
    assert total(joined) == 5
    joined.shutdown()


@pytest.mark.short(failure=True)
def test_group_goes_on_without_a_killed_member(pool, tmp_path):
    with pool.ranks(3, hosts="aab", init=False) as ranks:
        outcomes = ranks.outcomes(lose_a_member, new_file(tmp_path))
        assert outcomes[1].died
        assert not outcomes[0].failed, outcomes[0]
        assert not outcomes[2].failed, outcomes[2]


def wrong_handles(file):
    group, other = unconnected(), unconnected()
    own, others = group.get_reconfigure_handle(), other.get_reconfigure_handle()
    for handles in ([others], [own, own], [], ["nonsense"], ["{}"], ["[]"]):
        with pytest.raises(ValueError, match=r"^reconfigure\(\) takes [^\n]*$"):
            group.reconfigure(options(1, handles))
    # A member that does not come is an error in time, and the group may be reconfigured again.
    with pytest.raises(RuntimeError) as caught:
        group.reconfigure(options(2, [own, others], timedelta(seconds=0.5)))
    assert "\n" not in str(caught.value)
    group.reconfigure(options(3, [own]))
    assert total(group) == 1
    group.shutdown()


def test_wrong_handles(pool, tmp_path):
    with pool.ranks(1, init=False) as ranks:
        ranks.run(wrong_handles, new_file(tmp_path))


def by_torch_distributed(file):
    rank = int(os.environ["HOROVOD_RANK"])
    store = dist.FileStore(file, -1)
    dist.init_process_group(
        "horoplug", store=store, rank=rank, world_size=2, timeout=LIMIT, enable_reconfigure=True
    )
    group = dist.group.WORLD
    assert dist.distributed_c10d._supports_reconfigure()
    for uuid, members in enumerate(([1, 0], [0], [0, 1])):
        if rank in members:
            handles = handles_of(store, members, f"handle-{uuid}", group)
            dist.distributed_c10d._reconfigure(uuid, handles).wait()
            assert dist.get_rank() == members.index(rank)
            assert dist.get_world_size() == len(members)
            tensor = torch.tensor([2.0**rank])
            dist.all_reduce(tensor)
            assert int(tensor) == sum(2**member for member in members)
    dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(dist.distributed_c10d, "_reconfigure"), reason="needs PyTorch 2.14")
def test_functions_of_torch_distributed(pool, tmp_path):
    with pool.ranks(2, init=False) as ranks:
        ranks.run(by_torch_distributed, new_file(tmp_path))
