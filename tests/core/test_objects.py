"""Objects that are broadcast, gathered and sent: what did not come from a rank of the job is not unpickled."""

import collections
import itertools
import os
import pickle
import random
import socket
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest

import horoplug.numpy as hvd
from horoplug.common import object_tags
from horoplug.common.object_tags import HEADER_BYTES, ObjectOperation, ObjectTags
from horoplug.rendezvous.errors import TamperedMessageError
from tests.harness.limits import scaled
from tests.harness.relay import init_behind_relay
from tests.harness.support import seed

pytest_plugins = ["tests.harness.jobs"]

OPERATION = ObjectOperation("broadcast", 0, None)


def ranks(size, key=b"k" * 32):
    return [ObjectTags(key, rank, size) for rank in range(size)]


def opened(receiver, operation, source, header, data):
    length, digest = receiver.check_header(operation, source, header)
    object_tags.check(operation, source, digest, data)
    return length


# ---- headers ---------------------------------------------------------------------------------------------------------


def test_authentic_objects_are_accepted():
    a, b = ranks(2)
    for i in range(100):
        data = bytes(i)
        header = a.seal(OPERATION, data)
        assert len(header) == HEADER_BYTES
        assert opened(b, OPERATION, 0, header, data) == i


@pytest.mark.short(failure=True)
def test_any_changed_byte_is_noticed():
    a, _ = ranks(2)
    data = b"pickle"
    sealed = a.seal(OPERATION, data) + data
    for place in range(len(sealed)):
        _, b = ranks(2)
        changed = bytearray(sealed)
        changed[place] ^= 1 << random.randrange(8)
        with pytest.raises(TamperedMessageError, match="broadcast_object: the object from rank 0"):
            opened(b, OPERATION, 0, changed[:HEADER_BYTES], changed[HEADER_BYTES:])
    for length in range(HEADER_BYTES):
        with pytest.raises(TamperedMessageError):
            b.check_header(OPERATION, 0, sealed[:length])


@pytest.mark.parametrize("other", ["kind", "set", "name", "source", "key"])
def test_objects_of_another_operation_are_refused(other):
    a, b = ranks(2)
    changes = {"kind": {"kind": "allgather"}, "set": {"process_set": 1}, "name": {"name": "x"}}
    header = a.seal(OPERATION._replace(**changes.get(other, {})), b"x")
    if other == "key":
        header = ranks(2, b"l" * 32)[0].seal(OPERATION, b"x")
    with pytest.raises(TamperedMessageError):
        b.check_header(OPERATION, int(other == "source"), header)


def test_repeated_and_reordered_objects_are_refused():
    a, b = ranks(2)
    one, two, three = (a.seal(OPERATION, b"x") for _ in range(3))
    b.check_header(OPERATION, 0, two)
    for old in (one, two, one):
        with pytest.raises(TamperedMessageError, match="was repeated, or came out of order"):
            b.check_header(OPERATION, 0, old)
    b.check_header(OPERATION, 0, three)


def test_operations_of_different_names_may_run_in_any_order():
    a, b = ranks(2)
    rng = random.Random(seed())
    sent = [(name, a.seal(ObjectOperation("broadcast", 0, name), b"x")) for name in "abcdef"]
    for _ in range(20):
        rng.shuffle(sent)
        for name, header in sent:
            b.check_header(ObjectOperation("broadcast", 0, name), 0, header)
        sent = [(name, a.seal(ObjectOperation("broadcast", 0, name), b"x")) for name in "abcdef"]


def test_names_that_are_used_once_do_not_fill_memory():
    a, b = ranks(2)
    first = a.seal(ObjectOperation("broadcast", 0, "0"), b"x")
    b.check_header(ObjectOperation("broadcast", 0, "0"), 0, first)
    for i in range(1, b._capacity // 2 + 100):
        name = ObjectOperation("broadcast", 0, str(i))
        b.check_header(name, 0, a.seal(name, b"x"))
    assert b._remembered <= b._capacity
    with pytest.raises(TamperedMessageError, match="repeated"):  # although its name is forgotten
        b.check_header(ObjectOperation("broadcast", 0, "0"), 0, first)


# ---- jobs ------------------------------------------------------------------------------------------------------------


class Evil:
    """Unpickling it executes code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Replacer:
    """What a relay does: it replaces one text by another of the same length in what rank 0 sends."""

    _CERTAIN = 8
    """If what has arrived ends with at least this number of bytes of the text, the relay holds them back until the next
    bytes show whether it is the text. Fewer bytes may be the end of a random key, whose receiver has to answer before
    anything more arrives."""

    def __init__(self, text, replacement):
        assert len(text) == len(replacement)
        self.replaced = 0
        self._text, self._replacement = text, replacement

    def __call__(self, direction, source, sink):
        held = b""
        while data := source.recv(1 << 16):
            held += data
            sending = len(held)
            if direction == "down":
                self.replaced += held.count(self._text)
                held = held.replace(self._text, self._replacement)
                parts = (
                    n
                    for n in range(self._CERTAIN, len(self._text))
                    if held.endswith(self._text[:n])
                )
                sending -= max(parts, default=0)
            sink.sendall(held[:sending])
            held = held[sending:]


def test_the_replacer_holds_back_only_what_may_be_the_text():
    text, evil = b"0123456789", b"abcdefghij"
    (server, source), (sink, client) = socket.socketpair(), socket.socketpair()
    with server, source, sink, client:
        client.settimeout(20)
        replacer = Replacer(text, evil)
        thread = threading.Thread(target=replacer, args=("down", source, sink), daemon=True)
        thread.start()
        for sent, expected in ((b"key 01", b"key 01"), (b"x" + text[:8], b"x"), (text[8:], evil)):
            server.sendall(sent)
            received = b""
            while len(received) < len(expected):
                received += client.recv(100)
            assert received == expected
        server.shutdown(socket.SHUT_WR)
        thread.join(scaled(20))
        assert not thread.is_alive()
        assert replacer.replaced == 1


@pytest.mark.parametrize("operation", ["broadcast_object", "allgather_object"])
def test_pickle_that_was_replaced_on_the_network_is_not_unpickled(pool, operation, tmp_path):
    secret = "x" * 2000
    text = cloudpickle.dumps(secret)
    evil = pickle.dumps(Evil(str(tmp_path / "evil"))).ljust(len(text), b".")
    with pool.ranks(2, hosts="ab", init=False) as job:
        job.run(lambda: init_behind_relay(hvd.init, Replacer(text, evil)))
        call = lambda: getattr(hvd, operation)(secret)  # noqa: E731
        good, bad = job.outcomes(call)
        assert not good.failed, good
        assert bad.kind == "TamperedMessageError", bad
        assert "HorovodInternalError" in bad.bases
        assert f"{operation}: the object from rank 0 was changed on its way" in bad.message
        assert job.run(lambda: hvd.rank() == 0 or sys.horoplug_relay.forward.replaced) == [True, 1]
    assert not Path(tmp_path / "evil").exists()


@pytest.fixture(scope="module")
def job(pool):
    with pool.ranks(3, hosts="aab") as ranks:
        yield ranks


def test_objects_after_operations_that_not_all_ranks_called(job):
    """Ranks need not have called the same operations: one joins early, and a process set has some of them."""

    def work():
        some = hvd.add_process_set([0, 2])
        seen = []
        for step in range(3):
            if some.included():
                seen.append(hvd.broadcast_object(step, 2, process_set=some))
                seen += hvd.allgather_object((step, hvd.rank()), process_set=some)
            if hvd.rank() > step % 2:
                seen += hvd.allgather_object(hvd.rank(), "while others have joined")
            hvd.join()
            seen.append(hvd.broadcast_object(hvd.rank(), 1))
            assert hvd.allgather_object(hvd.rank()) == [0, 1, 2]
        hvd.remove_process_set(some)
        return seen

    zero, one, two = job.run(work)
    assert zero == [0, (0, 0), (0, 2), 1, 1, (1, 0), (1, 2), 1, 2, (2, 0), (2, 2), 1]
    assert one == [1, 2, 1, 1, 1, 2, 1]
    assert [item for item in two if isinstance(item, tuple)] == [
        (step, rank) for step in range(3) for rank in (0, 2)
    ]


def test_threads_exchange_objects_at_the_same_time(job):
    """Named operations in different orders on different ranks, and several threads without names."""

    def work(number):
        rng = random.Random(number + hvd.rank())
        results = collections.defaultdict(list)

        def named(name):
            for i in range(20):
                results[name].append(hvd.broadcast_object((name, i), i % 3, name))
                results[name] += hvd.allgather_object(i, name)

        def unnamed(name):
            for _ in range(20):
                results[name] += hvd.allgather_object(None)

        threads = [threading.Thread(target=named, args=(name,)) for name in "abc"]
        threads += [threading.Thread(target=unnamed, args=(name,)) for name in "xy"]
        rng.shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scaled(60))
        return dict(results)

    expected = {
        name: list(itertools.chain.from_iterable(((name, i), i, i, i) for i in range(20)))
        for name in "abc"
    }
    for found in job.run(work, seed()):
        assert {name: found[name] for name in "abc"} == expected
        assert found["x"] == found["y"] == [None] * 60


# ---- send_object and recv_object -------------------------------------------------------------------------------------


@pytest.mark.short
def test_objects_between_two_ranks(job):
    """A token is passed around; a process set, a second tag and the own rank are in use at the same time."""

    def work():
        size, rank = hvd.size(), hvd.rank()
        after, before = (rank + 1) % size, (rank - 1) % size
        pair = hvd.add_process_set([0, 2])
        own = threading.Thread(target=hvd.send_object, args=({"own": rank}, rank, 7))
        own.start()
        token = ["start"]
        for step in range(3):
            if rank:
                token = hvd.recv_object(before)
            hvd.send_object([*token, (step, rank)], after)
            if not rank:
                token = hvd.recv_object(before)
        assert hvd.recv_object(rank, 7) == {"own": rank}
        own.join(scaled(30))
        if rank == 0:
            hvd.send_object("x" * 3_000_000, 2, 4, pair)
        elif rank == 2:
            assert hvd.recv_object(0, 4, process_set=pair) == "x" * 3_000_000
        hvd.remove_process_set(pair)
        return token

    tokens = job.run(work)
    assert tokens[0] == ["start", *((step, rank) for step in range(3) for rank in range(3))]


def test_threads_send_objects_to_one_rank(job):
    """Several threads use one tag: no message of one object is taken for a message of another one."""

    def work(number):
        rng = random.Random(number + hvd.rank())
        if hvd.rank() == 0:
            received = [[], []]

            def receive(n):
                for _ in range(60):
                    received[n].append(hvd.recv_object(n + 1, 1))

            threads = [threading.Thread(target=receive, args=(n,)) for n in (0, 1)]
        else:

            def send(n):
                for i in range(20):
                    hvd.send_object((n, i, "x" * rng.randrange(5000)), 0, 1)

            threads = [threading.Thread(target=send, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scaled(60))
        return [[each[:2] for each in one] for one in received] if hvd.rank() == 0 else None

    for one in job.run(work, seed())[0]:
        for n in range(3):
            assert [i for m, i in one if m == n] == [*range(20)]


@pytest.mark.short(failure=True)
def test_invalid_objects_and_ranks_are_refused(job):
    def work():
        with pytest.raises(ValueError, match="rank 9 does not exist"):
            hvd.send_object(1, 9)
        with pytest.raises(ValueError, match="tags are 0 or more"):
            hvd.recv_object(0, -1)
        with pytest.raises(TypeError):
            hvd.send_object(threading.Lock(), 0)
        return hvd.allgather_object(hvd.rank())

    assert job.run(work) == [[0, 1, 2]] * 3


def test_sent_pickle_that_was_replaced_on_the_network_is_not_unpickled(pool, tmp_path):
    secret = "x" * 2000
    text = cloudpickle.dumps(secret)
    evil = pickle.dumps(Evil(str(tmp_path / "evil"))).ljust(len(text), b".")
    with pool.ranks(2, hosts="ab", init=False) as job:
        job.run(lambda: init_behind_relay(hvd.init, Replacer(text, evil)))

        def work():
            return hvd.send_object(secret, 1, 3) if hvd.rank() == 0 else hvd.recv_object(0, 3)

        good, bad = job.outcomes(work)
        assert not good.failed, good
        assert bad.kind == "TamperedMessageError", bad
        assert (
            "recv_object from 0 to 1 with tag 3: the object from rank 0 was changed" in bad.message
        )
    assert not Path(tmp_path / "evil").exists()
