"""A rank leaves its group while others still send to each other, as the last stage of a pipeline does."""

import os
import re
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from horoplug.torch.c10d import operations
from tests.harness.limits import scaled
from tests.harness.process_groups import process_groups

pytest_plugins = ["tests.harness.jobs"]

groups = process_groups("aab")
SIZES = [1, 100_000, 2_000_000]  # elements of transfers on each path


def group_without(leaver, seconds=30.0):
    """On all ranks: a group that ``leaver`` has left, and None on that rank."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    dist.barrier(group=group)
    if dist.get_rank() == leaver:
        group.shutdown()  # destroy_process_group() of PyTorch 2.1 does not call it
        dist.destroy_process_group(group)
        return None
    with pytest.raises(dist.DistBackendError, match=f"rank {leaver} has shut down"):
        dist.barrier(group=group)
    return group


def exchange(group, rank, peer):
    """Send tensors of several sizes in both directions, with several in flight."""
    received = [torch.zeros(size) for size in SIZES]
    works = [
        dist.isend(torch.full([size], float(rank)), peer, group=group, tag=tag)
        for tag, size in enumerate(SIZES)
    ]
    works += [dist.irecv(each, peer, group=group, tag=tag) for tag, each in enumerate(received)]
    for work in works:
        work.wait()
    assert [each.unique().tolist() for each in received] == [[float(peer)]] * len(SIZES)


def transfers_after_a_rank_has_left(leaver):
    rank = dist.get_rank()
    group = group_without(leaver)
    if group is None:
        return
    (peer,) = {0, 1, 2} - {rank, leaver}
    exchange(group, rank, peer)
    # From any source: one rank is left to send.
    if rank < peer:
        assert dist.recv(torch.zeros(1), group=group, tag=9) == peer
    else:
        dist.send(torch.ones(1), peer, group=group, tag=9)
    for call in (dist.send, dist.recv):
        with pytest.raises(dist.DistBackendError, match=f"rank {leaver} has shut down"):
            call(torch.zeros(1), leaver, group=group)
    with pytest.raises(dist.DistBackendError, match=f"cannot run: rank {leaver} has shut down"):
        dist.all_reduce(torch.zeros(1), group=group, async_op=True)
    exchange(group, rank, peer)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_transfers_go_on_when_a_rank_has_left(groups, leaver):
    groups.run(transfers_after_a_rank_has_left, leaver)


def pending_transfers(leaver):
    """What a rank waits for when another one leaves: that of the leaver fails, that of the other rank is done."""
    rank = dist.get_rank()
    (first, second) = sorted({0, 1, 2} - {leaver})
    group = dist.new_group()
    if rank == first:
        of_leaver = dist.irecv(torch.zeros(1), leaver, group=group, tag=1)
        to_leaver = dist.isend(torch.zeros(2_000_000), leaver, group=group, tag=2)
        other = torch.zeros(1)
        of_other = dist.irecv(other, second, group=group, tag=3)
    dist.barrier(group=group)
    if rank == leaver:
        # Its own operations without a partner end, and those that wait for them on other ranks.
        unanswered = dist.isend(torch.zeros(1), second, group=group, tag=4)
        group.shutdown()
        with pytest.raises(dist.DistBackendError, match="shut down"):
            unanswered.wait()
        dist.destroy_process_group(group)
        return
    if rank == first:
        for work in (of_leaver, to_leaver):
            with pytest.raises(dist.DistBackendError, match=f"rank {leaver} has shut down"):
                work.wait()
        dist.send(torch.ones(1), second, group=group)
        of_other.wait()
        assert other.item() == 7
    else:
        dist.recv(torch.ones(1), first, group=group)  # the leaver has left by now
        with pytest.raises(dist.DistBackendError, match=f"rank {leaver} has shut down"):
            dist.recv(torch.zeros(1), leaver, group=group, tag=4)
        dist.send(torch.tensor([7.0]), first, group=group, tag=3)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_pending_transfers_when_a_rank_leaves(groups, leaver):
    groups.run(pending_transfers, leaver)


def one_after_the_other():
    """All ranks but one leave in turn; a recv from any rank ends when the last one has left."""
    rank = dist.get_rank()
    group = dist.new_group()
    dist.barrier(group=group)
    if rank == 2:
        work = group.recv_anysource([torch.zeros(1)], 5)
        dist.recv(torch.zeros(1), 1, group=group)
        with pytest.raises(dist.DistBackendError, match="all other ranks have shut down"):
            work.wait()
    elif rank == 1:
        dist.recv(torch.zeros(1), 0, group=group)
        dist.send(torch.zeros(1), 2, group=group)
    else:
        dist.send(torch.zeros(1), 1, group=group)
    dist.destroy_process_group(group)


def test_recv_from_any_rank_ends_when_all_others_have_left(groups):
    groups.run(one_after_the_other)


def wait_for_each_other():
    group = group_without(2, 3.0)
    if group is None:
        return None
    with pytest.raises(dist.DistBackendError) as caught:
        dist.recv(torch.zeros(1), 1 - dist.get_rank(), group=group, tag=6)
    dist.destroy_process_group(group)
    return str(caught.value)


def test_deadlock_of_the_others_ends_at_the_time_limit(groups):
    for text in groups.run(wait_for_each_other)[:2]:
        assert "timeout of the process group: recv" in text
        found = re.search(r"from rank (.), tag 6 has been waiting for rank (.) for (\S+) s", text)
        assert found, text
        awaited = int(found[1])
        assert awaited in (0, 1)
        assert int(found[2]) == awaited
        assert float(found[3]) >= 3
        assert f"(submitted by rank {1 - awaited})" in text
        assert "the argument timeout of init_process_group or new_group sets the limit" in text


def test_callback_that_does_not_return_keeps_its_thread_and_not_the_program(monkeypatch, caplog):
    """The group has ended, and waits for the callbacks of its futures, for a while."""
    monkeypatch.setattr(operations, "_CLOSE_SECONDS", 0.2)
    over = threading.Event()
    ended = operations.Operations(None, "group 0", lambda: None)
    ended._thread = threading.Thread(target=over.wait, args=(60,), daemon=True)
    ended._thread.start()
    ended.close()
    assert not over.is_set()
    assert "group 0: a callback of a future has not returned for 0.2 s" in caplog.text
    over.set()
    ended._thread.join(scaled(60))
    ended.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ended._signal)
