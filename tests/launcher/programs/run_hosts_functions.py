import os

import numpy as np

import horoplug


def work(data):
    import horoplug as hvd

    hvd.init()
    total = hvd.allreduce(data, op=hvd.Sum)
    return (
        os.environ["HOROVOD_HOSTNAME"],
        hvd.rank(),
        float(total.sum()),
        np.full(2_000_000, hvd.rank()),
    )


def fail():
    import horoplug as hvd

    hvd.init()
    if hvd.rank() == 2:
        raise KeyError("there")
    hvd.barrier()


if __name__ == "__main__":
    found = horoplug.run(work, (np.ones(500_000),), num_proc=3, hosts="h0:1,h1:2")
    assert all((row[3] == row[1]).all() for row in found)
    print([row[:3] for row in found])
    try:
        horoplug.run(fail, num_proc=3, hosts="h0:1,h1:2")
    except horoplug.RankError as error:
        line = fail.__code__.co_firstlineno + 5
        print(error.rank, repr(error.__cause__), f"line {line}" in error.traceback)
    try:
        horoplug.run(fail, num_proc=2, hosts="h0:1,nonesuch:1")
    except horoplug.RankError as error:
        print(error)
