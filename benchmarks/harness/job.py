"""The command line that all benchmarks share, and the job that it starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import mpi
from harness.peers import PEERS, Horoplug, Peer

BUILD = "BENCH_BUILD"
"""An environment variable: the folder of the checkout whose package is measured, for jobs that compare two."""
LAUNCH = "import sys; from horoplug.runner.launch import main; sys.exit(main())"


def command_line(doc: str | None, peers: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """A parser with ``-np``, ``--json`` and, if it can have ``peers``, ``--peer``."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-np", type=int, default=0, help="start this many ranks on this machine")
    add("--json", metavar="FILE", help="also write the results to this file")
    if peers:
        add(
            "--hosts",
            type=int,
            default=0,
            help="distribute ranks round-robin over a number of simulated hosts that share no memory",
        )
        add(
            "--peer",
            action="append",
            default=[],
            metavar="NAME",
            type=lambda text: _known(text, peers),
            help=f"another library to measure in the same run: {', '.join(peers)}; may be repeated. "
            f"mpi4py:NAME takes one of several MPIs ({', '.join(mpi.KINDS)})",
        )
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments. With ``-np`` it does not return: the process becomes a launcher of that many ranks."""
    args = parser.parse_args()
    if args.np:
        script = [sys.executable, str(Path(sys.argv[0]).resolve()), *_without_np(sys.argv[1:])]
        wanted = {_mpi_of(peer) for peer in getattr(args, "peer", [])} - {None}
        if len(wanted) > 1:
            parser.error("--peer: two MPIs cannot share a process")
        for name in wanted:
            mpi.start(str(name), args.np, script)
        launcher = [sys.executable, "-c", LAUNCH, "-np", str(args.np)]
        os.execv(sys.executable, [*launcher, *script])
    if getattr(args, "hosts", 0):
        names = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
        rank = next((int(os.environ[name]) for name in names if name in os.environ), 0)
        os.environ["HOROVOD_HOSTNAME"] = f"host{rank % args.hosts}"
    return args


@contextmanager
def job(args: argparse.Namespace, *, peers: bool = True) -> Iterator[tuple[Horoplug, list[Peer]]]:
    """Horoplug, initialised, and the requested peers if ``peers`` is set."""
    check_build()
    own = Horoplug()
    wanted = getattr(args, "peer", []) if peers else []
    opened = [open_peer(name, own.hvd) for name in wanted]
    yield own, opened
    for peer in opened:
        peer.close()
    own.hvd.shutdown()


def check_build() -> None:
    """Raise ImportError if the variable ``BUILD`` names another checkout than that of the imported horoplug."""
    import horoplug

    expected, found = os.environ.get(BUILD), Path(str(horoplug.__file__)).resolve().parent.parent
    if expected and Path(expected).resolve() != found:
        raise ImportError(f"horoplug was imported from {found} instead of {expected}")


def open_peer(name: str, hvd: Any) -> Peer:
    """The peer of a name on the command line, which is also its name in results."""
    peer = PEERS[name.partition(":")[0]](hvd)
    peer.name = name
    return peer


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the command line that belong into the record."""
    return {name: value for name, value in vars(args).items() if name not in ("np", "json")}


def _known(text: str, peers: tuple[str, ...]) -> str:
    kind, _, which = text.partition(":")
    if kind not in peers or (which and (not PEERS[kind].needs_mpi or which not in mpi.KINDS)):
        raise argparse.ArgumentTypeError(f"{text}: not one of {', '.join(peers)}")
    return text


def _mpi_of(peer: str) -> str | None:
    """Name of the MPI that a peer needs, empty for any; None if it needs none."""
    kind, _, which = peer.partition(":")
    return which if PEERS[kind].needs_mpi else None


def _without_np(words: list[str]) -> list[str]:
    at = next(i for i, word in enumerate(words) if word.startswith("-np"))
    return words[:at] + words[at + (2 if words[at] == "-np" else 1) :]
