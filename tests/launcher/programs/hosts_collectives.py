import json
import os

import numpy as np

import horoplug as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
for count in (1, 1000, 300_000):
    mine = np.arange(count, dtype=np.float32) + rank
    everyones = [np.arange(count, dtype=np.float32) + r for r in range(size)]
    assert np.array_equal(hvd.allreduce(mine, op=hvd.Sum), sum(everyones))
    assert np.array_equal(hvd.allreduce(mine, op=hvd.Max), everyones[-1])
    assert np.array_equal(hvd.allgather(mine), np.concatenate(everyones))
    assert np.array_equal(hvd.broadcast(mine, root_rank=size - 1), everyones[-1])
    parts, splits = hvd.alltoall(np.full(size * 3, rank), splits=[3] * size)
    assert parts.tolist() == [r for r in range(size) for _ in range(3)]
    block = hvd.reducescatter(np.ones((size * 2, count // 100 + 1), np.float32), op=hvd.Sum)
    assert block.shape[0] == 2 and (block == size).all()
    hvd.barrier()
place = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
told = [
    int(os.environ["HOROVOD_" + n])
    for n in ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
]
assert list(place) == told
space = os.readlink("/proc/self/ns/net")
print(json.dumps([rank, *place, os.environ["HOROVOD_HOSTNAME"], space]))
hvd.shutdown()
