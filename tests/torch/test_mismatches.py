"""Ranks that wait for different operations get an error that names both sides, however they wait, and the job goes on.

No error comes while a rank can still continue."""

import threading
import time

import pytest
import torch

import horoplug.torch as hvd

pytest_plugins = ["tests.harness.jobs"]

DEADLOCK_TIME = 0.6  # seconds; the default, 5 s, is long for a test
QUICK = {"HOROVOD_DEADLOCK_TIME_SECONDS": str(DEADLOCK_TIME)}


def last():
    return hvd.size() - 1


OTHERS = {
    "barrier": lambda: hvd.barrier(),
    "allreduce": lambda: hvd.allreduce(torch.ones(2), name="theirs"),
    "allgather": lambda: hvd.allgather(torch.ones(2), name="theirs"),
    "broadcast": lambda: hvd.broadcast(torch.ones(2), 0, name="theirs"),
    "recv": lambda: hvd.recv(torch.ones(2), last()),
}


def started():
    return hvd.allreduce_async(torch.ones(3), name="mine")


def polling():
    handle = started()
    while not hvd.poll(handle):
        time.sleep(0.01)
    hvd.synchronize(handle)


def joined():
    errors = []

    def operation():
        try:
            hvd.allreduce(torch.ones(3), name="mine")
        except hvd.HorovodInternalError as error:
            errors.append(error)

    thread = threading.Thread(target=operation)
    thread.start()
    thread.join()
    raise errors[0]


def polling_in_a_joined_thread():
    errors = []

    def operation():
        try:
            polling()
        except hvd.HorovodInternalError as error:
            errors.append(error)

    thread = threading.Thread(target=operation)
    thread.start()
    thread.join()
    raise errors[0]


def optimizer_step():
    """One more step, of a model that only this rank has."""
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=[(f"mine.{name}", value) for name, value in model.named_parameters()],
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


WAYS = {
    "blocking": lambda: hvd.allreduce(torch.ones(3), name="mine"),
    "synchronize": lambda: hvd.synchronize(started()),
    "polling": polling,
    "joined thread": joined,
    "polling in a joined thread": polling_in_a_joined_thread,
    "optimizer step": optimizer_step,
}
PAIRS = [(way, other) for way in WAYS for other in OTHERS]


def mismatched(pairs):
    """For each pair: the error of this rank. The job goes on."""
    texts = []
    for way, other in pairs:
        hvd.barrier()
        try:
            WAYS[way]() if hvd.rank() == last() else OTHERS[other]()
            text = "no error"
        except hvd.HorovodInternalError as error:
            text = str(error)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item() == hvd.size()
        texts.append(text)
    return texts


# Each pair costs its time, so half of them run on two ranks and half on three.
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.short(failure=True)
def test_different_operations(pool, size):
    pairs = [pair for number, pair in enumerate(PAIRS) if number % 2 == size % 2]
    with pool.ranks(size, env=QUICK) as ranks:
        results = ranks.run(mismatched, pairs, timeout=300)
    wrong = [
        (pair, text)
        for pair, texts in zip(pairs, zip(*results, strict=True), strict=True)
        for text in texts
        if "deadlock: " not in text
        or f"ank {size - 1} waits for" not in text
        or "Rank 0 waits for" not in text
    ]
    assert not wrong


def in_process_sets():
    """Rank 0 calls the barriers of two process sets in another order than the others."""
    few, everyone = hvd.add_process_set([0, 1]), hvd.global_process_set
    text = ""
    try:
        for each in (few, everyone) if hvd.rank() == 0 else (everyone, few):
            if hvd.rank() in each.ranks:
                hvd.barrier(process_set=each)
    except hvd.HorovodInternalError as error:
        text = str(error)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item() == hvd.size()
    return text


def test_process_sets_in_another_order(pool):
    with pool.ranks(3, env=QUICK) as ranks:
        for text in ranks.run(in_process_sets):
            assert "deadlock: " in text
            for rank in range(3):
                assert f"ank {rank} waits for" in text


def late():
    """Rank 0 has an operation in flight, and does something else for longer than the deadlock time."""
    tensor = torch.ones(1)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="first")
        time.sleep(3 * DEADLOCK_TIME)
        until = time.monotonic() + 3 * DEADLOCK_TIME
        matrix = torch.rand(60, 60)
        while time.monotonic() < until:  # polls between two parts of a computation
            for _ in range(200):
                matrix = matrix @ matrix.T / 60
            assert not hvd.poll(handle)
        hvd.barrier()
        return hvd.synchronize(handle).item()
    hvd.barrier()
    return hvd.allreduce(tensor, op=hvd.Sum, name="first").item()


def test_late_rank_with_an_operation_in_flight_is_no_deadlock(pool):
    with pool.ranks(2, env=QUICK) as ranks:
        assert ranks.run(late) == [2, 2]
