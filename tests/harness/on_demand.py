"""Ranks on hosts of their own, which make connections on demand, without the core."""

import contextlib
import os
import secrets
import select
import socket
import struct
import threading

from horoplug.rendezvous.connections.neighbours import neighbours
from horoplug.rendezvous.connections.on_demand import ConnectionService
from horoplug.rendezvous.connections.peer_connection import Identity
from horoplug.rendezvous.connections.sockets import tcp_listener

ON_DEMAND = {"HOROPLUG_CONNECT_ALL": "0"}
"""Variables of a job in which a rank is connected with its host and its neighbours only."""
SECRET = secrets.token_bytes(32)
NEVER = 600.0  # seconds: longer than any test


def strangers(hosts):
    """The pairs of ranks on different hosts that are not neighbours."""
    size = len(hosts)
    numbers = [sorted(set(hosts)).index(host) for host in hosts]
    return [
        (a, b)
        for a in range(size)
        for b in range(a + 1, size)
        if hosts[a] != hosts[b] and b not in neighbours(a, numbers)
    ]


class RecordingEngine:
    """Stands for the core: keeps what it gets, and closes it."""

    def __init__(self):
        self.added = {}
        self.failed = {}
        self._changed = threading.Condition()

    def add_connection(self, rank, fds, keys):
        with self._changed:
            self.added.setdefault(rank, []).append((fds, keys))
            self._changed.notify_all()

    def fail_connection(self, rank, reason):
        with self._changed:
            self.failed.setdefault(rank, []).append(reason)
            self._changed.notify_all()

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, 60), (self.added, self.failed)

    def connection(self, rank):
        """The descriptors and keys of the only connection to a rank, as soon as it is there."""
        self.wait(lambda: rank in self.added or rank in self.failed)
        assert not self.failed
        (connection,) = self.added[rank]
        return connection

    def failure(self, rank):
        """The reason why there is no connection to a rank, as soon as it is known."""
        self.wait(lambda: rank in self.failed)
        (reason,) = self.failed[rank]
        assert "\n" not in reason
        assert reason.startswith("it cannot be connected to"), reason
        return reason

    def close(self):
        for connections in self.added.values():
            for fds, _ in connections:
                for fd in fds:
                    os.close(fd)
        self.added = {}


def request(fd, ranks):
    """Ask for connections to these ranks, as the core does."""
    os.write(fd, struct.pack(f"={len(ranks)}I", *ranks))


class Rank:
    """A rank on a host of its own, with a service."""

    def __init__(self, number, size, addresses, listener, streams=1, timeout=NEVER, **identity):
        self.number = number
        self.engine = RecordingEngine()
        me = Identity(number, size, 0, **({"secret": SECRET} | identity))
        others = {rank: address for rank, address in addresses.items() if rank != number}
        self.service = ConnectionService(listener, me, others, streams, timeout)
        self.requests = self.service.take_request_fd()

    def start(self):
        self.service.start(self.engine)

    def request(self, *ranks):
        request(self.requests, ranks)

    def close(self):
        self.service.close()
        self.engine.close()
        if self.requests >= 0:
            os.close(self.requests)
        self.requests = -1


@contextlib.contextmanager
def job(size, start=True, **arguments):
    """The ranks of a job."""
    with contextlib.ExitStack() as stack:
        listeners = [tcp_listener("127.0.0.1", size) for _ in range(size)]
        addresses = {rank: each.getsockname() for rank, each in enumerate(listeners)}
        ranks = []
        for rank, listener in enumerate(listeners):
            ranks.append(Rank(rank, size, addresses, listener, **arguments))
            stack.callback(ranks[-1].close)
        for rank in ranks if start else ():
            rank.start()
        yield ranks


def check_pair(one, other, streams, encrypt=False):
    """Check that two ranks have one connection with each other, that bytes flow over each lane, and that the ends have
    the same keys."""
    (near, keys), (far, their_keys) = (
        one.engine.connection(other.number),
        other.engine.connection(one.number),
    )
    assert len(near) == len(far) == streams
    assert len(keys) == len(their_keys) == (64 * streams if encrypt else 0)
    for lane in range(streams):
        sent, received = (keys[64 * lane + i : 64 * lane + i + 32] for i in (0, 32))
        assert received + sent == their_keys[64 * lane : 64 * lane + 64]
        for a, b in ((near[lane], far[lane]), (far[lane], near[lane])):
            assert not os.get_blocking(a)
            assert not os.get_inheritable(a)
            text = f"{one.number}-{other.number}, {lane}, {a}".encode()
            os.write(a, text)
            assert select.select([b], [], [], 20)[0]
            assert os.read(b, 100) == text
        with socket.socket(fileno=os.dup(near[lane])) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == NEVER * 1000
