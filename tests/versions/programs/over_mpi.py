"""Runs a program as if its ranks were on two hosts, so that data goes over MPI: over_mpi.py PROGRAM ARGUMENTS"""

import os
import runpy
import sys

from mpi4py import MPI

os.environ["HOROVOD_HOSTNAME"] = f"host{MPI.COMM_WORLD.rank % 2}"
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
