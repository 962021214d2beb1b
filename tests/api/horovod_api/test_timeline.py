"""HOROVOD_TIMELINE, start_timeline and stop_timeline."""

import json
import time

import horovod.torch as hvd
import pytest
import torch

pytestmark = pytest.mark.no_job


def path_for_all(tmp_path):
    """The path that rank 0, which writes the file, has chosen."""
    return hvd.broadcast_object(str(tmp_path / "timeline.json")) if hvd.is_initialized() else None


def reduce():
    hvd.allreduce(torch.tensor([1, 2, 3], dtype=torch.float32), name="test_allreduce")


def check(path, *, cycles):
    """Check the file on rank 0, the only rank that writes."""
    if hvd.rank() != 0:
        return
    with open(path) as file:
        text = file.read()
    assert isinstance(json.loads(text), list)
    for part in ("allreduce.test_allreduce", "NEGOTIATE_ALLREDUCE", "ALLREDUCE"):
        assert part in text
    if cycles:
        assert "CYCLE_START" in text


def test_timeline_by_environment_variable(tmp_path, monkeypatch):
    """The file exists while the job runs and is complete JSON after shutdown."""
    path = tmp_path / "timeline.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(path))
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", "1")
    hvd.init()
    reduce()
    deadline = time.monotonic() + 30
    wanted = ("allreduce.test_allreduce", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START")
    while hvd.rank() == 0:
        text = path.read_text() if path.exists() else ""
        if all(part in text for part in wanted):
            break
        assert time.monotonic() < deadline, text
        time.sleep(0.01)
    hvd.barrier()


def test_start_and_stop_timeline(tmp_path, monkeypatch):
    """Two files in succession, with cycle marks and without."""
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    hvd.init()
    for n, cycles in enumerate([True, True, False, True]):
        path = f"{path_for_all(tmp_path)}.{n}"
        hvd.start_timeline(path, mark_cycles=cycles)
        reduce()
        hvd.stop_timeline()
        check(path, cycles=cycles)
    hvd.barrier()


def test_start_timeline_twice_with_one_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    hvd.init()
    path = path_for_all(tmp_path)
    hvd.start_timeline(path, mark_cycles=False)
    hvd.start_timeline(path, mark_cycles=False)
    reduce()
    reduce()
    hvd.stop_timeline()
    check(path, cycles=False)
    hvd.barrier()


def test_start_timeline_needs_the_environment_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("HOROVOD_TIMELINE", raising=False)
    hvd.init()
    with pytest.raises(ValueError, match="HOROVOD_TIMELINE"):
        hvd.start_timeline(str(tmp_path / "timeline.json"))
    hvd.barrier()


@pytest.mark.parametrize("name", ["start_timeline", "stop_timeline"])
def test_timeline_functions_need_init(tmp_path, name):
    arguments = [str(tmp_path / "timeline.json")] if name == "start_timeline" else []
    with pytest.raises(ValueError, match="not been initialized"):
        getattr(hvd, name)(*arguments)
