import atexit
import os
import sys
import threading
import types

import mpi4py

mpi4py.rc.initialize = False
from mpi4py import MPI as real


class RecordingModule(types.ModuleType):
    def __getattr__(self, name):
        if name == "COMM_WORLD":
            threads.add(threading.get_ident())
        return getattr(real, name)


threads = set()
MPI = sys.modules["mpi4py.MPI"] = RecordingModule("mpi4py.MPI")
number = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["HOROVOD_HOSTNAME"] = f"host{number % 2}"


def at_the_end():
    # Below level multiple, only the thread that has initialised MPI has called it.
    if mpi4py.rc.thread_level != "multiple":
        assert len(threads) == 1 and threading.get_ident() not in threads, threads
    sys.stdout.write(f"rank {number}: finalized {real.Is_finalized()}\n")


atexit.register(at_the_end)  # registered first, so that it runs after horoplug's exit functions
