import os
import sys
from pathlib import Path

from mpi4py import MPI

rank, folder = MPI.COMM_WORLD.rank, Path(sys.argv[1])
if sys.argv[2] == "none" and rank == 1:
    os.environ["XDG_CONFIG_HOME"] = str(folder / "nothing")
if sys.argv[2] == "other" and rank == 1:
    os.environ["HOROPLUG_SECRET_KEY"] = 64 * "1"
import horoplug as hvd
from horoplug.rendezvous.bootstrap import over_mpi

sent, original = [], over_mpi._broadcast


def broadcast(communicator, message):
    sent.append(original(communicator, message))
    return sent[-1]


over_mpi._broadcast = broadcast
from horoplug.rendezvous.store import client

connect = client.StoreClient.connect


def connecting(address, port, secret, timeout, **options):
    sys.stdout.write("sent\n" if any(secret in each for each in sent) else "not sent\n")
    return connect(address, port, secret, timeout, **options)


client.StoreClient.connect = connecting
try:
    hvd.init()
    sys.stdout.write("done\n")
except ValueError as error:
    sys.stdout.write(f"refused: {error}\n")
