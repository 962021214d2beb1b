"""Allreduce between hosts: network namespaces on this machine, each with one rank, joined by a bridge.

    python benchmarks/network.py --hosts 2 --peer torch-gloo
    python benchmarks/network.py --hosts 4 --rate 0 -b 64K -e 64M -f 4        (unshaped: the CPU is the limit)

Needs root and iproute2. A pair of virtual Ethernet devices connects every namespace to the bridge; with ``--rate``,
token bucket filters limit both directions to this number of Mbit/s. Ranks, sizes, peers and the clock are those of
allreduce.py. ``--algorithm`` and ``--streams`` set HOROPLUG_ALGORITHM and HOROPLUG_NUM_STREAMS for all ranks. The peer
``mpi4py:mpich`` (``make mpi`` installs it) runs over TCP in the same namespaces; with ``--over mpi``, horoplug's data
goes over that MPI as well. ``bare-tcp`` is an allreduce of two hosts by hand in C over one connection (bare_tcp.c).

With ``--encrypt``, horoplug runs by turns without and with HOROPLUG_ENCRYPT=1 (``--turns``, medians over them);
``share`` is the encrypted variant's speed over that of the other one.

``line`` is busbw over the rate, at most 95.6 %: with an MTU of 1500, a frame of 1514 bytes has 1448 bytes of payload.
The namespaces are removed at the end, also after errors and signals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import mpi
from harness.record import Column, Plot, Record

ABOUT = """One collective between hosts. Each host is a network namespace of this machine with one rank, and one bridge
connects all hosts. busbw is the number of bytes that each rank must at least send or receive, over time. line is busbw
over the rate of the token bucket filters, of which the headers of frames take 4.4 %."""

COLUMNS = {
    "hosts": Column("hosts", form="d", width=5),
    "size": Column("size", "B", width=10),
    "library": Column("library", width=14),
    "time": Column("time", "µs", ".1f", 11),
    "p99": Column("p99", "µs", ".1f", 11),
    "busbw": Column("busbw", "Gbit/s", ".3f", 8),
    "line": Column("line", "%", ".1f", 6),
    "ratio": Column("ratio", "x", ".2f", 7),
    "share": Column("share", "%", ".1f", 6),
    "wrong": Column("#wrong", form="d", width=6),
}

# Of the MPIs, only MPICH: Open MPI's launcher would need daemons in the namespaces, and Intel's wheel lacks libfabric.
MPICH = "mpi4py:mpich"
PEERS = ("torch-gloo", "bare-tcp", MPICH)
# MPICH over TCP: by default the ranks would use shared memory, because all see the host name of this machine.
TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", "MPIR_CVAR_NOLOCAL": "1"}
ROOT = Path(__file__).resolve().parent.parent
PORT = 29400
# Burst size and queueing time of a filter. The burst is small enough that messages of 256 KiB see the rate; the queue
# is as long as those of cheap switches.
BURST = "128kb"
QUEUE = "20ms"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


class Network:
    """Namespaces ``<prefix>0`` ... with addresses 10.213.0.1 ..., and another namespace for the bridge between them."""

    def __init__(self, hosts: int, rate: int, congestion: str) -> None:
        """``rate``: Mbit/s of each host's link in either direction; 0: unshaped."""
        self.prefix = f"hp{os.getpid()}h"
        self.names = [f"{self.prefix}{i}" for i in range(hosts)]
        self.addresses = [f"10.213.0.{i + 1}" for i in range(hosts)]
        self.bridge = f"hp{os.getpid()}b"
        self.rate = rate
        self.congestion = congestion

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _make(self) -> None:
        run("ip", "netns", "add", self.bridge)
        run("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.bridge, "link", "set", "br0", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{i}"
            run("ip", "netns", "add", name)
            run(
                *("ip", "-n", name, "link", "add", "eth0", "type", "veth"),
                *("peer", "name", port, "netns", self.bridge),
            )
            run("ip", "-n", self.bridge, "link", "set", port, "master", "br0", "up")
            run(
                *("ip", "netns", "exec", name, "sh", "-c"),
                f"echo {self.congestion} > /proc/sys/net/ipv4/tcp_congestion_control",
            )
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            if self.rate:
                for space, device in ((name, "eth0"), (self.bridge, port)):
                    run(
                        *("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf"),
                        *("rate", f"{self.rate}mbit", "burst", BURST, "latency", QUEUE),
                    )

    def inside(self, host: int) -> list[str]:
        """The prefix of a command that runs on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def remove(self) -> None:
        """Remove the namespaces, also after an incomplete creation. Idempotent."""
        for name in (*self.names, self.bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def environment(network: Network, args: argparse.Namespace, encrypt: bool) -> dict[str, str]:
    """The variables of all ranks."""
    variables = {
        "HOROPLUG_SECRET_KEY": secrets.token_hex(32),
        "HOROPLUG_GLOO_RENDEZVOUS_ADDR": network.addresses[0],
        "HOROPLUG_GLOO_RENDEZVOUS_PORT": str(PORT),
        "HOROPLUG_RENDEZVOUS_SERVER": "rank0",
        "HOROPLUG_GLOO_IFACE": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": network.addresses[0],
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }
    if encrypt:
        variables["HOROPLUG_ENCRYPT"] = "1"
    if args.over == "mpi":
        variables["HOROPLUG_CPU_OPERATIONS"] = "mpi"
    if args.algorithm:
        variables["HOROPLUG_ALGORITHM"] = args.algorithm
    if args.streams:
        variables["HOROPLUG_NUM_STREAMS"] = str(args.streams)
    return {**os.environ, **variables}


def start_ranks(
    network: Network, script: Sequence[str], variables: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    size = str(len(network.names))
    return [
        subprocess.Popen(
            [*network.inside(rank), *script],
            env={**variables, "HOROPLUG_RANK": str(rank), "HOROPLUG_SIZE": size},
            start_new_session=True,
        )
        for rank in range(len(network.names))
    ]


def start_mpi(
    network: Network, script: Sequence[str], variables: dict[str, str], scratch: str
) -> list[subprocess.Popen[bytes]]:
    """Run the benchmark with Hydra, MPICH's launcher, whose ssh is replaced by a script that enters a namespace."""
    found = mpi.find("mpich")
    if found is None:
        raise SystemExit("mpich is not installed here: make mpi")
    entry = Path(scratch) / "enter"
    entry.write_text(
        "#!/bin/sh\n# [-x] address command: runs it in the namespace of that address\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        f'host=$((${{1##*.}} - 1)); shift\nexec ip netns exec "{network.prefix}$host" sh -c "$*"\n'
    )
    entry.chmod(0o755)
    command = [str(found.mpirun.with_name("mpiexec")), "-launcher", "ssh"]
    command += ["-launcher-exec", str(entry), "-iface", "eth0"]
    command += ["-hosts", ",".join(network.addresses), "-ppn", "1", "-n", str(len(network.names))]
    return [
        subprocess.Popen(
            [*network.inside(0), *command, *script],
            env={**variables, **found.environment(), **TCP},
            start_new_session=True,
        )
    ]


def wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait for processes and return the first exit code that is not 0. Ends all of them if one fails or on SIGTERM."""
    try:
        code = 0
        for process in processes:
            code = code or process.wait()
        return code
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that the namespaces are removed."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def measure(hosts: int, args: argparse.Namespace, encrypt: bool = False) -> list[dict[str, Any]]:
    """Rows of allreduce.py's table; empty if the benchmark failed."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        Network(hosts, args.rate, args.congestion) as network,
    ):
        table = Path(scratch) / "table.json"
        script = [sys.executable, str(ROOT / "benchmarks" / "allreduce.py"), "--json", str(table)]
        script += ["-b", args.begin, "-e", args.end, "-f", args.factor, "-n", str(args.iterations)]
        script += ["--collective", args.collective]
        for peer in args.peer:
            script += ["--peer", peer]
        variables = environment(network, args, encrypt)
        if args.over == "mpi" or MPICH in args.peer:
            processes = start_mpi(network, script, variables, scratch)
        else:
            processes = start_ranks(network, script, variables)
        if wait(processes):
            return []
        rows: list[dict[str, Any]] = json.loads(table.read_text())["rows"]
    return rows


def measure_both(hosts: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows without and with encryption, by size: of each column the median over the turns."""
    turns: dict[bool, list[list[dict[str, Any]]]] = {False: [], True: []}
    for turn in range(2 * args.turns):
        encrypt = turn % 4 in (1, 2)
        rows = measure(hosts, args, encrypt)
        if not rows:
            return []
        turns[encrypt].append(rows)
    table: list[dict[str, Any]] = []
    for i in range(len(turns[False][0])):
        plain, encrypted = (
            {
                name: statistics.median(rows[i][name] for rows in turns[encrypt])
                for name in ("time", "p99", "busbw")
            }
            | {"wrong": sum(rows[i]["wrong"] for rows in turns[encrypt]), "ratio": None}
            | {"size": turns[encrypt][0][i]["size"]}
            for encrypt in (False, True)
        )
        share = 100 * plain["time"] / encrypted["time"]
        table.append(plain | {"library": "horoplug"})
        table.append(encrypted | {"library": "encrypted", "share": share})
    return table


def report(record: Record, hosts: int, rows: list[dict[str, Any]], rate: int) -> None:
    for row in rows:
        busbw = 8 * row["busbw"]
        record.row(
            hosts=hosts,
            **{name: row[name] for name in ("size", "library", "time", "p99", "ratio", "wrong")},
            busbw=busbw,
            share=row.get("share"),
            line=100e3 * busbw / rate if rate else None,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", default="2,4", help="numbers of hosts, separated by commas [2,4]")
    add("--rate", type=int, default=1000, help="Mbit/s of a host's link; 0: unshaped [1000]")
    add(
        "--peer",
        action="append",
        default=[],
        choices=PEERS,
        help="another library, in the same run; may be repeated",
    )
    add("--over", choices=("tcp", "mpi"), default="tcp", help="what carries the data [tcp]")
    add("--congestion", default="reno", help="TCP's congestion control [reno]")
    add("--encrypt", action="store_true", help="compare with encrypted connections")
    add("--turns", type=int, default=3, help="of each variant, with --encrypt [3]")
    add("--algorithm", help="force an algorithm")
    add("--streams", type=int, help="connections between two hosts")
    add("--collective", default="allreduce", help="[allreduce]")
    add("-b", dest="begin", default="4", help="smallest size in bytes [4]")
    add("-e", dest="end", default="64M", help="largest size [64M]")
    add("-f", dest="factor", default="4", help="factor between sizes [4]")
    add("-n", dest="iterations", type=int, default=0, help="iterations [by size]")
    add("--json", metavar="FILE", help="also write the results to this file")
    args = parser.parse_args()
    if args.encrypt and (args.peer or args.over == "mpi"):
        parser.error("--encrypt compares horoplug over TCP with itself, without --peer and --over")
    return args


def main() -> int:
    args = parse()
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("network.py needs root and iproute2 (ip, tc) to make network namespaces")
    line = f"{args.rate} Mbit/s" if args.rate else "unshaped"
    record = Record(
        "network",
        f"{args.collective}, float32, between network namespaces, {line}",
        ABOUT,
        COLUMNS,
        [
            Plot("lines", "size", "busbw", "library"),
            Plot("lines", "size", "share" if args.encrypt else "ratio", "library"),
        ],
        ranks=1,
        options=vars(args),
    )
    try:
        with terminable():
            for hosts in map(int, args.hosts.split(",")):
                measured = (measure_both if args.encrypt else measure)(hosts, args)
                if not measured:
                    return 1
                report(record, hosts, measured, args.rate)
    except KeyboardInterrupt:
        return 130
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
