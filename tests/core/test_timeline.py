"""HOROVOD_TIMELINE on real ranks: events and times, and a file that stays valid JSON when the job is killed."""

import collections
import json
import os
import time

import numpy as np
import pytest

import horoplug as hvd
from tests.harness.support import environment, run_script, seed

pytest_plugins = ["tests.harness.jobs"]

MEDIA = ("SELF", "SHM", "STREAM", "MIXED")
COPIES = ("MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER")


def read(path):
    """The events in the file. The read is repeated once if the file changed meanwhile."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return json.loads(path.read_bytes())


def read_until(path, condition, seconds=20.0):
    """The events in the file, once they fulfil a condition."""
    deadline = time.monotonic() + seconds
    while True:
        events = read(path) if path.exists() and path.stat().st_size else []
        if condition(events):
            return events
        assert time.monotonic() < deadline, events[-20:]
        time.sleep(0.005)


def rows(events):
    """Events by the title of their row, ordered by start time. Checks that each event has every field."""
    titles = {}
    by_row = collections.defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str)
        assert event["pid"] == 0
        if event["ph"] == "M":
            assert event["args"]
            if event["name"] == "thread_name":
                assert event["tid"] not in titles
                titles[event["tid"]] = event["args"]["name"]
            continue
        assert event["ph"] in ("X", "i")
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        else:
            assert event["s"] in ("t", "p")
        by_row[titles[event["tid"]]].append(event)
    for found in by_row.values():
        found.sort(key=lambda e: (e["ts"], -e.get("dur", 0)))
    return by_row


def spans(events):
    return [e for e in events if e["ph"] == "X"]


def check_nesting(events):
    """Check that two spans of a row are disjoint or nested. Times are exact to a nanosecond."""
    open_until = []
    for event in spans(events):
        begin = round(event["ts"] * 1000)
        end = begin + round(event["dur"] * 1000)
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], (event, events)
        open_until.append(end)


def check_tensor(events, operation):
    """Check that a tensor's row repeats: submitted, negotiated, waited, run. Returns the numbers of its batches."""
    check_nesting(events)
    found = spans(events)
    inside = [e for e in found if e["name"] in COPIES or e["name"].split("_")[0] in MEDIA]
    outer = [e for e in found if e not in inside]
    assert [e["name"] for e in outer] == [f"NEGOTIATE_{operation}", "WAIT", operation] * (
        len(outer) // 3
    )
    for negotiated, waited, run in zip(outer[::3], outer[1::3], outer[2::3], strict=True):
        assert negotiated["args"] == waited["args"] == run["args"]
    for event in inside:
        parent = [e for e in outer[2::3] if e["ts"] <= event["ts"] < e["ts"] + e["dur"] + 0.001]
        assert event["args"]["batch"] in [e["args"]["batch"] for e in parent]
    transfers = [e for e in inside if e["name"] not in COPIES]
    assert {e["args"]["batch"] for e in transfers} == {e["args"]["batch"] for e in outer}
    assert all(e["name"].endswith("_" + operation) for e in transfers)
    batches = [e["args"]["batch"] for e in outer[2::3]]
    assert batches == sorted(set(batches))
    return batches


def train(steps):
    """Several operations in each step, fused and not fused, some of them in memory that must be packed."""
    for _ in range(steps):
        handles = [hvd.allreduce_async(np.ones(100 * i + 1), name=f"grad.{i}") for i in range(8)]
        handles.append(hvd.allgather_async(np.ones((3, 2)), name="gathered"))
        handles.append(hvd.broadcast_async(np.ones(5), 0, name="sent"))
        handles.append(hvd.reducescatter_async(np.ones((7, 2)), name="scattered"))
        handles.append(hvd.alltoall_async(np.ones((6, 2)), name="exchanged"))
        for handle in handles:
            hvd.synchronize(handle)
        hvd.barrier()


@pytest.mark.parametrize("hosts", ["a", "aa", "aab"])
@pytest.mark.short
def test_timeline_events_of_every_operation(pool, tmp_path, hosts):
    path = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    env["HOROPLUG_PLAN_AFTER_STEPS"] = "0"
    with pool.ranks(len(hosts), hosts=hosts, env=env) as ranks:
        ranks.run(train, 5)
    assert path.stat().st_mode & 0o777 == 0o600, "others can read the names of tensors"
    by_row = rows(json.loads(path.read_text()))
    expected = {f"allreduce.grad.{i}": "ALLREDUCE" for i in range(8)} | {
        "allgather.gathered": "ALLGATHER",
        "broadcast.sent": "BROADCAST",
        "reducescatter.scattered": "REDUCESCATTER",
        "alltoall.exchanged": "ALLTOALL",
    }
    batches_of = {name: check_tensor(by_row[name], kind) for name, kind in expected.items()}
    assert all(len(batches) == 5 for batches in batches_of.values())
    for name in expected:
        names = [e["name"] for e in by_row[name] if e["ph"] == "i"]
        assert names.count("SUBMITTED") == 5
        # A child of the root reports for all ranks below it.
        if len(hosts) > 1:
            ready = [e["args"]["ready"] for e in by_row[name] if e["name"] == "READY"]
            assert len(ready) == 5 * len(set(ready))
            assert set(ready) == ({"rank 1"} if hosts == "aa" else {"rank 1", "rank 2"})

    check_nesting(by_row["batches"])
    batches = [e for e in spans(by_row["batches"]) if "tensors" in e["args"]]
    numbers = [e["args"]["batch"] for e in batches]
    assert numbers == list(range(1, len(numbers) + 1))
    for batch in batches:
        members = [n for n, found in batches_of.items() if batch["args"]["batch"] in found]
        assert batch["name"] == "BARRIER" or len(members) == batch["args"]["tensors"]
    started = [e["args"]["batch"] for e in by_row["batches"] if e["name"] == "BATCH_STARTED"]
    assert started == numbers
    assert {e["name"] for e in by_row["cycles"]} == {"CYCLE_START"}


def test_timeline_of_planned_batches_has_the_plan_number(pool, tmp_path):
    """While a plan is installed, batches carry its number and there are no READY events."""
    path = tmp_path / "timeline.json"
    with pool.ranks(2, env={"HOROVOD_TIMELINE": str(path)}) as ranks:
        ranks.run(train, 20)
    row = rows(json.loads(path.read_text()))["allreduce.grad.3"]
    check_tensor(row, "ALLREDUCE")
    plans = [e["args"]["plan"] for e in spans(row) if e["name"] == "ALLREDUCE"]
    assert len(plans) == 20
    assert plans.count(1) > 10
    assert len([e for e in row if e["name"] == "READY"]) < 10


def test_timeline_has_the_events_of_horovod(pool, tmp_path):
    """The file has Horovod's events soon after the operations, while the job runs."""
    path = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    with pool.ranks(2, env=env) as ranks:
        ranks.run(lambda: hvd.allreduce(np.ones(3, np.float32), name="test_allreduce"))
        read_until(path, lambda events: "ALLREDUCE" in [e["name"] for e in events])
        text = path.read_text()
        for word in (
            "allreduce.test_allreduce",
            "start_time_since_epoch_in_micros",
            "NEGOTIATE_ALLREDUCE",
            "CYCLE_START",
        ):
            assert word in text
        start = read(path)[0]["args"]["start_time_since_epoch_in_micros"]
        assert abs(start / 1e6 - time.time()) < 120


def test_timeline_file_is_valid_json_at_any_time(pool, tmp_path):
    path = tmp_path / "timeline.json"
    with pool.ranks(2, env={"HOROVOD_TIMELINE": str(path)}) as ranks:
        sizes = set()
        # A busy machine may leave this process no time while the ranks train: they do it again, into the same file.
        for _ in range(20):
            ranks.start(train, 300)
            while not ranks.workers[0].connection.poll():
                sizes.add(len(read(path)))
            assert not [o for o in ranks.collect() if o.failed]
            if len(sizes) > 2:
                break
    assert len(sizes) > 2
    for events in rows(json.loads(path.read_text())).values():
        check_nesting(events)


def test_timeline_of_a_killed_job_shows_operations_in_flight(pool, tmp_path):
    """The row of an operation in flight has the event SUBMITTED only."""
    rng = np.random.default_rng(seed())
    for attempt in range(5):
        path = tmp_path / f"{attempt}.json"
        with pool.ranks(2, env={"HOROVOD_TIMELINE": str(path)}) as ranks:

            def submit():
                train(3)
                if hvd.rank() == 0:
                    hvd.allreduce_async(np.ones(3), name="pending")
                    hvd.allreduce_async(np.ones(3), name='an odd "name"\n')
                while hvd.rank() == 0:
                    hvd.barrier  # noqa: B018 - busy until it is killed
                hvd.allreduce(np.ones(3), name="other")

            ranks.start(submit)
            read_until(path, lambda events: "pending" in str(events))
            time.sleep(rng.uniform(0, 0.05))
            ranks.kill(0)
            assert all(outcome.failed for outcome in ranks.collect())
        by_row = rows(json.loads(path.read_text()))
        for name in ("allreduce.pending", 'allreduce.an odd "name"\n'):
            assert [e["name"] for e in by_row[name]] == ["SUBMITTED"]
        assert len(check_tensor(by_row["allreduce.grad.0"], "ALLREDUCE")) == 3


def test_timeline_of_a_job_killed_under_load_is_readable(pool, tmp_path):
    """The job is killed at a random moment in a series of operations."""
    rng = np.random.default_rng(seed())
    for attempt in range(8):
        path = tmp_path / f"{attempt}.json"
        with pool.ranks(2, env={"HOROVOD_TIMELINE": str(path)}) as ranks:
            ranks.start(train, 1_000_000)
            read_until(path, lambda events: len(events) > 100)
            time.sleep(rng.uniform(0, 0.1))
            ranks.kill(0)
            assert all(outcome.failed for outcome in ranks.collect())
        for events in rows(json.loads(path.read_text())).values():
            check_nesting(events)


@pytest.mark.short
def test_start_and_stop_timeline(pool, tmp_path):
    def part(name, marks):
        # All ranks call the function, and rank 0 writes.
        hvd.start_timeline(f"{name}.{hvd.rank()}.json", mark_cycles=marks)
        train(2)
        if name != "b":  # b is completed by the start of c
            hvd.stop_timeline()
            hvd.stop_timeline()

    with pool.ranks(2, env={"HOROVOD_TIMELINE": "DYNAMIC"}) as ranks:
        ranks.run(os.chdir, tmp_path)
        assert list(tmp_path.iterdir()) == []
        for name in "abca":
            ranks.run(part, name, name == "b")
            ranks.run(train, 1)
            file = tmp_path / f"{name}.0.json"
            if name == "b":
                read_until(file, lambda events: "CYCLE_START" in str(events))
            else:
                assert "cycles" not in rows(json.loads(file.read_text()))
        ranks.run(os.chdir, "/")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.0.json", "b.0.json", "c.0.json"]
    for path, times in (("a", 2), ("b", 3), ("c", 2)):  # the first file a was replaced
        by_row = rows(json.loads((tmp_path / f"{path}.0.json").read_text()))
        assert len(check_tensor(by_row["allreduce.grad.1"], "ALLREDUCE")) == times


def test_invalid_start_and_stop_calls_are_refused(pool, tmp_path):
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.start_timeline("x")
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.stop_timeline()

    def start(path):
        hvd.start_timeline(path)

    with pool.ranks(2) as ranks:
        outcomes = ranks.outcomes(start, str(tmp_path / "x.json"))
        for outcome in outcomes:
            assert "ValueError" in outcome.bases
            assert "Set HOROVOD_TIMELINE=DYNAMIC" in outcome.message
        ranks.run(hvd.stop_timeline)
    with pool.ranks(2, env={"HOROPLUG_TIMELINE": "DYNAMIC"}) as ranks:
        wrong = {str(tmp_path / "no" / "x.json"): "No such file", str(tmp_path): "directory"}
        for path, reason in wrong.items():
            first, second = ranks.outcomes(start, path)
            assert first.kind == "ValueError"
            assert path in first.message
            assert reason in first.message
            assert not second.failed  # rank 1 writes no file
        for path in ("", "a\0b"):
            assert {o.kind for o in ranks.outcomes(start, path)} == {"ValueError"}
        ranks.run(start, tmp_path / "x.json")
        ranks.run(train, 1)
    assert "allreduce.grad.1" in rows(json.loads((tmp_path / "x.json").read_text()))
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_every_init_starts_a_new_timeline(pool, tmp_path):
    path = tmp_path / "timeline.json"
    with pool.ranks(2, env={"HOROVOD_TIMELINE": str(path)}) as ranks:
        for steps in (3, 1):
            ranks.run(train, steps)
            ranks.run(hvd.shutdown)
            by_row = rows(json.loads(path.read_text()))
            assert len(check_tensor(by_row["allreduce.grad.1"], "ALLREDUCE")) == steps
            ranks.run(hvd.init)


SCRIPT = """
import numpy as np
import horoplug as hvd
hvd.init()
print(hvd.allreduce(np.ones(2), op=hvd.Sum))
"""


@pytest.mark.short(failure=True)
def test_unwritable_timeline_is_a_one_line_warning(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = tmp_path / "missing" / "timeline.json"
    first, second = run_script(script, size=2, env={"HOROVOD_TIMELINE": str(path)})
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout == "[2. 2.]\n"
    assert first.stderr.count("\n") == 1
    assert f"the timeline cannot be written to {path}: No such file" in first.stderr
    assert second.stderr == ""


def test_more_tensor_names_than_timeline_rows(tmp_path):
    """The number of rows is limited: later names share rows, without overlap."""
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\n"
        "import horoplug as hvd\n"
        "hvd.init()\n"
        "for i in range(0, 20_000, 50):\n"
        "    many = [hvd.allreduce_async(np.ones(1), name=f'n.{i + j}') for j in range(50)]\n"
        "    for handle in many: hvd.synchronize(handle)\n"
    )
    path = tmp_path / "timeline.json"
    (done,) = run_script(script, env=environment() | {"HOROVOD_TIMELINE": str(path)})
    assert (done.returncode, done.stderr) == (0, "")
    events = json.loads(path.read_text())
    titles = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert 16_000 < len(titles) < 17_000
    shared = {
        e["tid"]
        for e in events
        if e["name"] == "thread_name" and e["args"]["name"] == "further tensors"
    }
    assert 0 < len(shared) <= 50
    for row in shared:
        mine = [e for e in events if e.get("tid") == row and e["ph"] != "M"]
        check_nesting(sorted(mine, key=lambda e: (e["ts"], -e.get("dur", 0))))
        assert all("tensor" in e["args"] for e in mine if e["name"] == "ALLREDUCE")
    late = {e["args"].get("tensor") for e in events if e["name"] == "ALLREDUCE" and "args" in e}
    assert "allreduce.n.19999" in late
