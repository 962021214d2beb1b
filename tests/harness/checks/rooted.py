"""Checks of reduce, gather, scatter, send and recv on NumPy arrays, for ranks of any job."""

import random

import numpy as np

import horoplug as hvd

DTYPES = ["float32", "float64", "float16", "int32", "int64", "uint8"]


def array_of(rank, shape, dtype):
    """An array of small integers, whose sums are exact in every dtype."""
    return np.random.default_rng([rank, *shape]).integers(0, 5, shape).astype(dtype)


def check_rooted(key, process_set=hvd.global_process_set, members=None):
    """Check reduce, gather and scatter with random shapes, dtypes and roots. ``members``: global ranks of the set."""
    if not process_set.included():
        return
    members = members or list(range(hvd.size()))
    draw, rank = random.Random(key), hvd.rank()
    for _ in range(8):
        root, dtype = draw.choice(members), draw.choice(DTYPES)
        shape = (draw.choice([0, 1, 17, 5000, 70_001]), draw.choice([1, 3]))
        mine = array_of(rank, shape, dtype)
        before = mine.copy()
        total = sum(array_of(r, shape, dtype) for r in members).astype(dtype)
        expected = total if rank == root else before
        found = hvd.reduce(mine, root, op=hvd.Sum, process_set=process_set)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(mine, before)
        found = hvd.reduce_(mine, root, op=hvd.Sum, process_set=process_set)
        assert found is mine
        np.testing.assert_array_equal(mine, expected)

        rows = {r: draw.choice([0, 1, 4, 3000]) for r in members}
        parts = [array_of(r, (rows[r], 2), dtype) for r in members]
        handle = hvd.gather_async(array_of(rank, (rows[rank], 2), dtype), root, None, process_set)
        found = hvd.synchronize(handle)
        whole = np.concatenate(parts)
        np.testing.assert_array_equal(found, whole if rank == root else whole[:0])

        splits = [rows[r] for r in members]
        given = whole if rank == root else whole[:0]
        found = hvd.scatter(given, root, splits if rank == root else None, process_set=process_set)
        np.testing.assert_array_equal(found, parts[members.index(rank)])
        found = hvd.scatter(given, root, process_set=process_set)
        np.testing.assert_array_equal(
            found, np.array_split(whole, len(members))[members.index(rank)]
        )


def check_pairs(key, process_set=hvd.global_process_set, members=None):
    """Many sends are in flight between random ranks, submitted in a different order on each rank."""
    if not process_set.included():
        return
    members = members or list(range(hvd.size()))
    draw, rank = random.Random(key), hvd.rank()
    transfers = [
        (draw.choice(members), draw.choice(members), tag, draw.choice([0, 1, 100, 50_000]))
        for tag in range(40)
    ]
    own = list(enumerate(transfers))
    random.Random(f"{key} {rank}").shuffle(own)
    sends, received = [], {}
    for n, (source, dest, tag, count) in own:
        if source == rank:
            data = np.full(count, n, np.float32)
            sends.append(hvd.send_async(data, dest, tag, process_set=process_set))
        if dest == rank:
            data = np.zeros(count, np.float32)
            received[n] = data, hvd.recv_async(data, source, tag, process_set=process_set)
    for n, (data, handle) in received.items():
        assert hvd.synchronize(handle) is data
        assert (data == n).all(), n
    for handle in sends:
        assert hvd.synchronize(handle) is None
