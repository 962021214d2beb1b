"""The cost of the agreement on the next operations, for jobs of 2 to 65,536 ranks.

    make cpp-release && python benchmarks/control_plane.py --tensors 1000

The benchmark runs the engine's own negotiators, connected in memory, and counts their messages and bytes
(csrc/tests/bench/control_plane_bench.cc explains how, and why one negotiator can represent several ranks). In every
step each rank submits all tensors in ``bursts`` parts; the ranks agree on each part before they submit the next one.
Protocols:

horoplug, first step    every name is new
horoplug, later steps   names have numbers
horoplug, last step     the last of the steps, after the order has recurred often enough to install a plan. Equal to the
                        later steps if no plan is installed.
Horovod, first step     as computed below
Horovod, later steps    as computed below

``mean sent`` is the average over the ranks; ``busiest rank`` has the most bytes, sent and received.

The figures of Horovod 0.28 are computed from its source (horovod/common/controller.cc, response_cache.cc,
mpi/mpi_controller.cc, wire/message.fbs), in its favour: payloads only, without the framing of FlatBuffers and MPI and
without the lists of devices, in collectives of the fewest messages. In every cycle (1 ms unless tuned) all ranks
reduce, by recursive doubling, one bit for each cached tensor and four status bits. If a rank has a tensor that is not
cached, each rank then sends a length and its requests to rank 0, which broadcasts a length and its responses.
``--step-ms`` is the duration of a step, which determines the number of cycles.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from harness.job import command_line, options_of
from harness.record import Column, Plot, Record

ABOUT = """Messages and bytes with which all ranks agree on the next operations, in each step of training. Horoplug's
figures are counted while its negotiators run, connected in memory. Horovod's figures are computed from its source, in
its favour: payloads only, and one cycle per millisecond of a step of 100 ms unless the command has other values. First
step: every name is new. Last step: the order has recurred many times."""

COLUMNS = {
    "ranks": Column("ranks", width=7),
    "tensors": Column("tensors", width=7),
    "bursts": Column("bursts", width=6),
    "protocol": Column("protocol", width=21),
    "messages": Column("mean sent", "messages", ".2f", 10),
    "bytes": Column("mean sent", "B", ".0f", 10),
    "busiest_messages": Column("busiest rank", "messages", ".0f", 12),
    "busiest_bytes": Column("busiest rank", "B", ".0f", 13),
    "simulated": Column("negotiators", width=11),
}

ROOT = Path(__file__).resolve().parent.parent
BINARY = "control_plane_bench"
STEPS = 20  # the last one is reported as the last step
FULL = 2**17  # ranks x tensors up to which there is a negotiator for each rank


class Traffic(NamedTuple):
    """The messages and bytes of one step."""

    messages: float
    bytes: float
    busiest_messages: float
    busiest_bytes: float


# ---- Horovod's protocol ----------------------------------------------------------------------------------------------

STATUS_BITS = 4  # response_cache.h: shut down, uncached in queue, invalid in queue, just joined
WORD = 8  # bits travel in long longs (response_cache.cc, CacheCoordinator::sync)
LENGTH = 4  # MPI_INT (mpi_controller.cc, SendReadyTensors, SendFinalTensors)
# message.fbs: request_rank, root_rank, device (int), request_type, tensor_type (byte), two factors (double)
REQUEST = 3 * 4 + 2 * 1 + 2 * 8
DIMENSION = 8  # tensor_shape: [long]
RESPONSE = 8  # tensor_sizes: [long], of which a fused allreduce has one for each tensor


def horovod(ranks: int, tensors: int, name_bytes: int, cycles: int, *, first: bool) -> Traffic:
    """A step of ``cycles`` in which all ranks submit matrices with ``name_bytes`` of names."""
    rounds = math.ceil(math.log2(ranks))
    vector = WORD * math.ceil(((0 if first else tensors) + STATUS_BITS) / (8 * WORD))
    messages, size = cycles * rounds, cycles * rounds * vector
    busiest = Traffic(messages, size, 2 * messages, 2 * size)
    if not first:
        return busiest
    requests = name_bytes + tensors * (REQUEST + 2 * DIMENSION)
    responses = name_bytes + tensors * RESPONSE
    others = ranks - 1
    up, down = 2 * others, 2 * others  # messages of all ranks: lengths and contents
    up_bytes, down_bytes = others * (LENGTH + requests), others * (LENGTH + responses)
    return Traffic(
        messages + (up + down) / ranks,
        size + (up_bytes + down_bytes) / ranks,
        2 * messages
        + up
        + 2 * rounds,  # rank 0 receives from all ranks, and is the root of a binomial tree
        2 * size + up_bytes + rounds * (LENGTH + responses),
    )


# ---- horoplug's negotiators ------------------------------------------------------------------------------------------


def find_binary(given: str | None) -> str:
    candidates = [Path(given)] if given else sorted(ROOT.glob(f"build/release/bin/{BINARY}"))
    if not candidates or not os.access(candidates[0], os.X_OK):
        raise SystemExit(f"{given or BINARY} does not exist: run make cpp-release")
    return str(candidates[0])


def simulate(binary: str, ranks: int, tensors: int, bursts: int, per_host: int) -> dict[str, Any]:
    mode = "full" if ranks * tensors <= FULL else "symmetric"
    numbers = map(str, (ranks, tensors, bursts, STEPS, per_host))
    done = subprocess.run([binary, *numbers, mode], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{BINARY} ended with {done.returncode}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def measured_step(measured: dict[str, Any], number: int) -> Traffic:
    step, ranks = measured["steps"][number], measured["ranks"]
    busiest = step["busiest_messages"], step["busiest_bytes"]
    return Traffic(step["messages"] / ranks, step["bytes"] / ranks, *busiest)


def measure(args: Any, binary: str, record: Record) -> None:
    cycles = max(args.bursts, round(args.step_ms / args.cycle_ms))
    ranks = 2
    while ranks <= args.max_ranks:
        measured = simulate(binary, ranks, args.tensors, args.bursts, args.ranks_per_host)
        common = ranks, args.tensors, measured["name_bytes"], cycles
        protocols = {
            "horoplug, first step": measured_step(measured, 0),
            "horoplug, later steps": measured_step(measured, 1),
            "horoplug, last step": measured_step(measured, STEPS - 1),
            "Horovod, first step": horovod(*common, first=True),
            "Horovod, later steps": horovod(*common, first=False),
        }
        for protocol, traffic in protocols.items():
            simulated = measured["simulated"] if protocol.startswith("horoplug") else None
            record.row(
                ranks=ranks,
                tensors=args.tensors,
                bursts=args.bursts,
                protocol=protocol,
                simulated=simulated,
                **traffic._asdict(),
            )
        ranks *= args.factor


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--tensors", type=int, default=1000, help="number of tensors in each step [1000]")
    add("--bursts", type=int, default=1, help="parts in which a step submits its tensors [1]")
    add("--max-ranks", type=int, default=65536, help="largest number of ranks [65536]")
    add("--factor", type=int, default=2, help="factor between numbers of ranks [2]")
    add("--ranks-per-host", type=int, default=8, help="number of ranks on each host [8]")
    add("--step-ms", type=float, default=100, help="Horovod: duration of a step in ms [100]")
    add("--cycle-ms", type=float, default=1, help="Horovod: time between cycles in ms [1]")
    add("--binary", help=f"path of {BINARY} [in build/release/bin]")
    args = parser.parse_args()
    if args.np:
        parser.error("the ranks are simulated")
    if args.factor < 2:
        parser.error("--factor must be at least 2")
    binary = find_binary(args.binary)
    args.binary = None
    record = Record(
        "control_plane",
        f"control plane, {args.tensors} tensors in {args.bursts} burst(s)",
        ABOUT,
        COLUMNS,
        [
            Plot("lines", "ranks", "bytes", "protocol"),
            Plot("lines", "ranks", "busiest_bytes", "protocol"),
            Plot("lines", "ranks", "messages", "protocol"),
        ],
        ranks=1,
        options=options_of(args),
    )
    measure(args, binary, record)
    last = [row for row in record.rows if row["protocol"] == "horoplug, last step"][-1]
    record.note(
        f"after {STEPS} equal steps, with {last['ranks']} ranks, a rank sends {last['messages']:.2f} messages "
        f"and {last['bytes']:.0f} B per step"
    )
    record.note(
        f"up to {FULL // args.tensors} ranks, every rank has a negotiator; in larger jobs, ranks with equal subtrees "
        "share one"
    )
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
