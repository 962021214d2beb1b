"""The hub, which connects the ranks of one host with each other: what it sends, and what its members refuse."""

import contextlib
import errno
import os
import secrets
import socket
import struct
import threading
import time

import pytest

from horoplug.rendezvous.connections import host_hub
from horoplug.rendezvous.connections.host_hub import Hub, HubLoop, Member
from horoplug.rendezvous.connections.peer_connection import Identity, PeerConnection, Stage
from horoplug.rendezvous.errors import PeerLostError, ProtocolError, TamperedMessageError
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer
from tests.harness.descriptors import descriptors
from tests.harness.limits import scaled

SECRET = secrets.token_bytes(32)


class Host:
    """The connections of the hub, rank 0, with the other ranks of a host, ready, and each rank's memfd and eventfd."""

    def __init__(self, size, stack):
        self.size = size
        self.memory, self.hub, self.members = {}, {}, {}
        for rank in range(size):
            self.memory[rank] = os.memfd_create(f"test-{rank}"), os.eventfd(0, os.EFD_NONBLOCK)
            for fd in self.memory[rank]:
                stack.callback(os.close, fd)
        for rank in range(1, size):
            ends = socket.socketpair()
            made = []
            for me, end, target in ((0, ends[0], None), (rank, ends[1], 0)):
                end.setblocking(False)
                identity = Identity(me, size, 0, SECRET)
                identity.fds = self.memory[me]
                made.append(
                    PeerConnection(
                        end,
                        identity,
                        target=target,
                        admit=lambda *_: None,
                        label=f"rank {rank if target is None else 0}",
                    )
                )
                stack.callback(made[-1].close)
            made[1].connected()
            while any(each.stage is not Stage.READY for each in made):
                for each in made:
                    each.advance()
            self.hub[rank], self.members[rank] = made

    def others(self, rank):
        return set(range(1, self.size)) - {rank}


@pytest.fixture
def host():
    with contextlib.ExitStack() as stack:
        yield lambda size: Host(size, stack)


def drive(host, stop=lambda: False):
    """Run the hub and all members in turn until all are done; returns the members, and what the hub had open."""
    hub = Hub(host.hub)
    members = {
        rank: Member(0, connection, host.others(rank)) for rank, connection in host.members.items()
    }
    most = 0
    for _ in range(10000):
        most = max(most, sum(len(m.ends) for o in hub._members.values() for m in o.outbox))
        for rank in members:
            hub.advance(rank)
        if stop():
            break
        for member in members.values():
            member.advance(0)
        if hub.done and all(member.done for member in members.values()):
            break
    return hub, members, most


@pytest.mark.parametrize("size", [3, 4, 18, 40])
def test_every_pair_is_connected(host, size):
    ranks = host(size)
    hub, members, most = drive(ranks)
    assert hub.done
    assert most <= host_hub.HUB_DESCRIPTORS
    for rank, member in members.items():
        assert sorted(member.received) == sorted(ranks.others(rank))
        for other, (stream, segment, doorbell) in member.received.items():
            assert not os.get_blocking(stream)
            assert not any(os.get_inheritable(fd) for fd in (stream, segment, doorbell))
            assert os.path.sameopenfile(segment, ranks.memory[other][0])
            os.eventfd_write(doorbell, 1)
            os.write(stream, f"{rank} to {other}".encode())
    for rank, member in members.items():
        assert os.eventfd_read(ranks.memory[rank][1]) == size - 2
        for other, (stream, _, _) in member.received.items():
            assert os.read(stream, 100) == f"{other} to {rank}".encode()
    for member in members.values():
        member.close()
    hub.close()


def test_only_ranks_that_owe_an_answer_are_awaited(host):
    """Rank 7 is stopped: the hub waits for it, some other ranks for the hub, and those that are done for nobody."""
    ranks = host(40)
    hub = Hub(ranks.hub)
    members = {rank: Member(0, ranks.members[rank], ranks.others(rank)) for rank in ranks.members}
    for _ in range(1000):
        for rank, member in members.items():
            hub.advance(rank)
            if rank != 7:
                member.advance(0)
    assert not hub.done
    assert hub.awaited == [7]
    assert {tuple(member.awaited) for member in members.values() if member.done} == {()}
    assert {tuple(member.awaited) for member in members.values() if not member.done} == {(0,)}
    for member in members.values():
        member.close()
    hub.close()


def test_connections_end_with_their_ranks(host):
    """The hub keeps no copy of what it has sent, so that the end of a rank closes its connections."""
    before = descriptors()
    hub, members, _ = drive(host(5))
    open_after = descriptors()
    members[1].close()
    for rank in (2, 3, 4):
        assert os.read(members[rank].received[1][0], 1) == b""
        members[rank].close()
    assert open_after > descriptors() > before  # the connections to the hub are left
    hub.close()


def test_hub_that_ends_early_leaks_nothing(host):
    ranks = host(20)
    before = descriptors()
    hub, members, _ = drive(ranks, stop=lambda: True)
    assert not hub.done
    hub.close()
    for member in members.values():
        member.close()
    for (
        rank,
        connection,
    ) in ranks.hub.items():  # descriptors that are under way are closed with the sockets
        connection.close()
        ranks.members[rank].close()
    assert descriptors() < before


def test_number_of_descriptors_in_transit_is_bounded(host):
    """The hub waits for answers: the kernel limits the descriptors under way for each user."""
    ranks = host(70)
    hub, members, _ = drive(ranks, stop=lambda: True)
    block = 3 * 2 * host_hub._BLOCK * host_hub._BLOCK
    assert 0 < hub._under_way <= host_hub._UNDER_WAY + block
    hub.close()
    for member in members.values():
        member.close()


def test_hub_retries_when_the_kernel_accepts_no_more_descriptors(host, monkeypatch):
    ranks = host(6)
    refusals = iter([True, False, True, True])
    original = host_hub._Message.send

    def refuse(message, sock):
        if next(refusals, False):
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return original(message, sock)

    monkeypatch.setattr(host_hub._Message, "send", refuse)
    hub, members, _ = drive(ranks)
    assert hub.done
    assert next(refusals, None) is None
    for member in members.values():
        assert member.done
        member.close()


def message(ranks, magic=b"HPhu", count=None):
    return struct.pack(f"!4sI{len(ranks)}I", magic, len(ranks) if count is None else count, *ranks)


@pytest.mark.parametrize(
    ("payload", "fds", "error"),
    [
        (message([2]), 2, "2 descriptors for 1 ranks"),
        (message([2]), 4, "4 descriptors for 1 ranks"),
        (message([2, 2]), 6, "unexpected ranks"),
        (message([0]), 3, "unexpected ranks"),
        (message([1]), 3, "unexpected ranks"),
        (message([9]), 3, "unexpected ranks"),
        (message([2], count=2), 6, "malformed"),
        (message([2], magic=b"HPme"), 3, "malformed"),
        (b"HPhu", 0, "too short"),
        (bytes(5000), 0, "limit"),
    ],
)
def test_invalid_message_of_the_hub_is_refused(host, payload, fds, error):
    ranks = host(4)
    member = Member(0, ranks.members[1], ranks.others(1))
    before = descriptors()
    with open(os.devnull) as null:
        data = ranks.hub[1].channel.seal(payload)
        socket.send_fds(ranks.hub[1].sock, [data], [null.fileno()] * fds)
    with pytest.raises(ProtocolError, match=error):
        member.advance(0)
    assert not member.received
    member.close()
    assert descriptors() == before


@pytest.mark.parametrize("at", [0, 40, -1])
def test_changed_message_of_the_hub_is_refused(host, at):
    ranks = host(3)
    member = Member(0, ranks.members[1], ranks.others(1))
    data = bytearray(ranks.hub[1].channel.seal(message([2])))
    data[at] ^= 1
    with open(os.devnull) as null:
        socket.send_fds(ranks.hub[1].sock, [bytes(data)], [null.fileno()] * 3)
    before = descriptors()
    with pytest.raises(TamperedMessageError):
        member.advance(0)
    assert not member.received
    member.close()
    assert descriptors() <= before


def test_invalid_answer_of_a_member_is_refused(host):
    ranks = host(3)
    hub = Hub(ranks.hub)
    hub.advance(1)
    ranks.members[1].sock.send(ranks.members[1].channel.seal(b"what"))
    with pytest.raises(ProtocolError, match="no valid answer"):
        hub.advance(1)
    hub.close()


@pytest.mark.parametrize("lost", ["hub", "member"])
def test_lost_rank_is_named(host, lost):
    ranks = host(4)
    if lost == "hub":
        ranks.hub[1].close()
        endpoint, culprit = Member(0, ranks.members[1], ranks.others(1)), 0
    else:
        ranks.members[3].close()
        endpoint, culprit = Hub(ranks.hub), 3
    deadline = time.monotonic() + scaled(60)
    with (
        StoreServer(SECRET) as server,
        StoreClient.connect(*server.address, SECRET, 60) as store,
        contextlib.closing(endpoint),
        HubLoop(endpoint, deadline) as loop,
    ):

        def run():
            while time.monotonic() < deadline:
                loop.run_once(store)

        with pytest.raises(PeerLostError, match=f"rank {culprit} has ended or failed") as caught:
            run()
    assert caught.value.rank == culprit


def test_event_loops_connect_all(host):
    ranks = host(24)
    endpoints = [
        Hub(ranks.hub),
        *(Member(0, c, ranks.others(r)) for r, c in ranks.members.items()),
    ]
    failures = []

    def run(endpoint, store):
        try:
            with HubLoop(endpoint, time.monotonic() + 60) as loop:
                while not endpoint.done:
                    loop.run_once(store)
        except BaseException as error:
            failures.append(error)

    with StoreServer(SECRET) as server, contextlib.ExitStack() as stack:
        threads = []
        for endpoint in endpoints:
            store = stack.enter_context(StoreClient.connect(*server.address, SECRET, 60))
            threads.append(threading.Thread(target=run, args=(endpoint, store), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scaled(60))
            assert not thread.is_alive()
    assert not failures
    assert all(endpoint.done for endpoint in endpoints)
    for endpoint in endpoints:
        endpoint.close()
