"""The collectives of MPI as algorithms of horoplug: they give the same results as its own algorithms."""

import json
import random
import re

import pytest

from tests.harness import program_text
from tests.harness.mpi_jobs import finish, mpirun, no_files_of_mpi, on_hosts, place

pytest.importorskip("mpi4py")

__all__ = ["no_files_of_mpi", "place"]  # fixtures

# Two ranks on each of two hosts.
PROGRAM = program_text("tests/mpi/programs/collectives.py")


def test_mpi_collectives_match_own_algorithms(place, tmp_path):
    seed = random.randrange(10**9)
    print("seed", seed)
    timelines = [tmp_path / "forced.json", tmp_path / "chosen.json"]
    status, output = finish(
        mpirun(
            place,
            on_hosts(PROGRAM),
            str(seed),
            *map(str, timelines),
            np=4,
            HOROVOD_CPU_OPERATIONS="mpi",
        ),
        100,
    )
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) is done", output)) == ["0", "1", "2", "3"], output
    # MPI's collectives were used: always, and then depending on the size.
    forced, chosen = map(spans, timelines)
    for kind in ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER", "BARRIER"):
        if (place.name, kind) == ("impi", "ALLGATHER"):  # Intel MPI's allgather may hang
            assert not forced.keys() & {f"MPI_{kind}"}
            continue
        assert f"MPI_{kind}" in forced, (kind, forced)
        if kind in ("ALLGATHER", "ALLTOALL"):
            # Small operations precede the large ones. Horoplug's own algorithm depends on the operation and its size.
            assert max(forced[f"MPI_{kind}"]) > 10_000, (kind, forced)
            own = max(chosen.get(f"STREAM_{kind}", set()) | chosen.get(f"MIXED_{kind}", set()))
            assert max(chosen[f"MPI_{kind}"]) < own, (kind, chosen)


def spans(timeline):
    """The sizes in bytes of the spans in a timeline, by name."""
    found = {}
    for event in json.loads(timeline.read_text()):
        if "bytes" in event.get("args", {}):
            found.setdefault(event["name"], set()).add(event["args"]["bytes"])
    return found
