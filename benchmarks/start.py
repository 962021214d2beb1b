"""The cost of starting a job: what init() adds to the start of the processes, and the store alone with many clients.

    python benchmarks/start.py --ranks 16,64,128
    python benchmarks/start.py --ranks 128 --hosts 16     (HOROPLUG_CONNECT_ALL=0: connections on demand)
    python benchmarks/start.py --ranks "" --store 1024,4096

processes   horovodrun starts ranks that import horoplug.numpy and end
init        the same ranks also call init() and shutdown()

Both take turns for ``--rounds`` rounds, and each row has the median. ``processor`` is the processor time of all
processes together: unlike ``time``, it does not depend on what else the machine does. ``ratio`` is what init adds, over
``processes``. The compiled bytecode is in a cache, as in an installed package.

Store: a server in a process of its own, all clients in another one. ``connect`` authenticates them all; ``table`` is
one exchange of records (every client publishes one, the first client reads all and publishes a table, the others read
the table); ``barrier`` is one wait until all have arrived. ``received`` are the bytes of the table, for all clients.
"""

from __future__ import annotations

import multiprocessing
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from harness import whole_job
from harness.job import LAUNCH, command_line, options_of
from harness.record import Column, Plot, Record
from harness.whole_job import Cost

from horoplug.base import descriptors
from horoplug.rendezvous.connections.records import Barrier, RankRecords
from horoplug.rendezvous.connections.records import Record as Fields
from horoplug.rendezvous.connections.tables import table_of_ranks
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer

ABOUT = """The start of a job: processes that only import horoplug.numpy, and what init() and shutdown() add
to them; medians of alternating rounds. Processor time is that of all processes together. Store: the rendezvous server
and all clients, without ranks."""

COLUMNS = {
    "ranks": Column("ranks", width=6),
    "what": Column("what", width=10),
    "seconds": Column("time", "s", ".2f", 8),
    "processor": Column("processor", "s", ".2f", 10),
    "ratio": Column("ratio", "time", ".2f", 7),
    "processor_ratio": Column("ratio", "processor", ".2f", 10),
    "server": Column("of the server", "s", ".2f", 13),
    "received": Column("received", "MB", ".2f", 9),
}

PROGRAMS = {
    "processes": "import horoplug.numpy",
    "init": "import horoplug.numpy as hvd; hvd.init(); hvd.shutdown()",
}
# Blocks of ranks are on hosts that share no memory and connect over the loopback interface.
ON_HOST = """
import os
os.environ["HOROVOD_HOSTNAME"] = str(int(os.environ["HOROVOD_RANK"]) * {hosts} // {ranks})
"""
LIMIT = 600.0  # seconds for one job


# ---- jobs ------------------------------------------------------------------------------------------------------------


def run_job(ranks: int, program: str, env: Mapping[str, str]) -> Cost:
    command = [sys.executable, "-c", LAUNCH, "-np", str(ranks), sys.executable, "-c", program]
    return whole_job.run(command, env, LIMIT)


def median(costs: list[Cost]) -> Cost:
    return Cost(*map(statistics.median, zip(*costs, strict=True)))


def measure_jobs(
    record: Record, ranks: int, hosts: int, rounds: int, env: Mapping[str, str]
) -> None:
    place = ON_HOST.format(hosts=hosts, ranks=ranks) if hosts > 1 else ""
    found: dict[str, list[Cost]] = {what: [] for what in PROGRAMS}
    for _ in range(rounds):
        for what, program in PROGRAMS.items():
            found[what].append(run_job(ranks, place + program, env))
    processes, both = median(found["processes"]), median(found["init"])
    added = Cost(both.seconds - processes.seconds, both.processor - processes.processor)
    record.row(ranks=ranks, what="processes", **processes._asdict())
    record.row(
        ranks=ranks,
        what="init",
        **added._asdict(),
        ratio=added.seconds / processes.seconds,
        processor_ratio=added.processor / processes.processor,
    )


# ---- the store alone -------------------------------------------------------------------------------------------------


def serve(secret: bytes, pipe: Connection) -> None:
    """The server's process: answers each message with the processor time so far, and ends with the pipe."""
    descriptors.raise_limit()
    with StoreServer(secret) as server:
        pipe.send(server.address)
        try:
            while True:
                pipe.recv()
                pipe.send(time.process_time())
        except EOFError:
            return


def measure_store(record: Record, ranks: int) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    secret = secrets.token_bytes(32)
    process = context.Process(target=serve, args=(secret, theirs))
    process.start()
    theirs.close()
    address, port = mine.recv()

    def server_time() -> float:
        mine.send(None)
        return float(mine.recv())

    def measure(what: str, run: Callable[[], int | None]) -> None:
        server, own, began = server_time(), time.process_time(), time.perf_counter()
        received = run()
        seconds, own, server = (
            time.perf_counter() - began,
            time.process_time() - own,
            server_time() - server,
        )
        record.row(
            ranks=ranks,
            what=what,
            seconds=seconds,
            processor=own + server,
            server=server,
            received=None if received is None else received / 1e6,
        )

    clients: list[StoreClient] = []
    records: list[RankRecords] = []

    def connect() -> None:
        for rank in range(ranks):
            client = StoreClient.connect(address, port, secret, LIMIT)
            client.register(rank)
            clients.append(client)
            records.append(RankRecords(client, "0/", rank, range(ranks), LIMIT))

    def table() -> int:
        for rank in (*range(1, ranks), 0):  # the first client waits for all others
            fields: Fields = {
                "version": "1.0",
                "size": ranks,
                "host": f"{'k' * 60}/{'t' * 32}{rank // 8}",
                "unix": "n" * 33,
                "processors": list(range(64)),
            }
            if rank:
                records[rank].publish("rank", fields)
            else:
                records[rank].share("rank", fields, table_of_ranks)
        key, received = records[0].table_key("rank"), 0
        for client in clients[1:]:
            (value,) = client.get([key], LIMIT)
            received += len(value)
        return received

    def barrier() -> None:
        barriers = [Barrier(each, "up") for each in records]
        for each in barriers:
            each.arrive()
        for each in barriers:  # that of rank 0 first, which tells the others
            each.wait()

    measure("connect", connect)
    measure("table", table)
    measure("barrier", barrier)
    for client in clients:
        client.close()
    mine.close()
    process.join()


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument(
        "--ranks", type=numbers, default=[16, 64, 128], help="sizes of the jobs [16,64,128]"
    )
    parser.add_argument(
        "--store", type=numbers, default=[], help="numbers of clients of the store alone"
    )
    parser.add_argument("--hosts", type=int, default=1, help="simulated hosts of each job [1]")
    parser.add_argument("--rounds", type=int, default=3, help="of both kinds of job [3]")
    args = parser.parse_args()
    descriptors.raise_limit()
    record = Record(
        "start",
        "start of a job",
        ABOUT,
        COLUMNS,
        [Plot("lines", "ranks", "processor", "what")],
        ranks=1,
        options=options_of(args),
    )
    with whole_job.cached_bytecode() as env:
        if args.ranks:
            run_job(2, PROGRAMS["init"], env)  # fills the cache
        for ranks in args.ranks:
            measure_jobs(record, ranks, args.hosts, args.rounds, env)
    for ranks in args.store:
        measure_store(record, ranks)
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
