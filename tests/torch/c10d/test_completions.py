"""What completes an operation may raise: that becomes the operation's error, and the next ones are not affected."""

import contextlib
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from horoplug.torch.c10d import ProcessGroup, operations
from horoplug.torch.c10d.group import _open, _shut_down_all
from tests.harness.process_groups import begin, end, new_file
from tests.harness.support import until

pytest_plugins = ["tests.harness.jobs"]

MISMATCH = "mismatched shape"


class Model(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=sparse)
        self.last = nn.Linear(3, 2)

    def forward(self, rows):
        return self.last(self.table(rows))


def trained(sparse, **options):
    """A model whose gradients exist."""
    model = DistributedDataParallel(Model(sparse), **options)
    model(torch.tensor([dist.get_rank(), 3])).sum().backward()
    return model


def unfinished():
    """A model that DistributedDataParallel has refused is referred to as by sys.last_traceback."""
    with pytest.raises(RuntimeError, match="is not needed") as caught:
        DistributedDataParallel(nn.ReLU())
    return caught


def works():
    tensor = torch.ones(3)
    dist.all_reduce(tensor, async_op=True).get_future().wait()
    assert tensor.tolist() == [dist.get_world_size()] * 3


def one_line(caught):
    assert "\n" not in str(caught.value), caught.value
    return str(caught.value)


def mismatches(kept):
    """An all_reduce that fails, in all ways of waiting, while objects exist whose parameters cannot be asked for."""
    different = torch.ones(5 + dist.get_rank())
    for wait in (
        lambda: dist.all_reduce(different),
        lambda: dist.all_reduce(different, async_op=True).wait(),
        lambda: dist.all_reduce(different, async_op=True).get_future().wait(),
    ):
        with pytest.raises(RuntimeError, match=MISMATCH) as caught:
            wait()
        # It is not a bucket of DDP, although it has the size of one.
        assert "module." not in one_line(caught)
        works()
    future = dist.all_reduce(different, async_op=True).get_future()
    with pytest.raises(RuntimeError, match=MISMATCH):
        future.then(lambda failed: failed.value()).wait()
    works()
    work = dist.all_reduce(different, async_op=True)
    future = work.get_future()  # both get the error, whoever is first
    for wait in (work.wait, future.wait, work.wait):
        with pytest.raises(RuntimeError, match=MISMATCH) as caught:
            wait()
        one_line(caught)
    assert isinstance(work.exception(), dist.DistBackendError)
    works()


def conversions():
    """Results that cannot be moved to the caller's tensors."""
    one = torch.ones(3)
    outputs = [torch.zeros(1).expand(3) for _ in range(dist.get_world_size())]
    with pytest.raises(RuntimeError, match="single memory location"):
        dist.all_gather(outputs, one)
    for wait in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        work = dist.all_gather(outputs, one, async_op=True)
        with pytest.raises(RuntimeError, match="single memory location"):
            wait(work)
        works()


def callbacks():
    """What a callback of a future raises is the error of the future that it makes, and of no other one."""

    def raises(error):
        def callback(future):
            raise error

        return callback

    for error in (ValueError("by a callback"), SystemExit(3), KeyboardInterrupt()):
        first, second = (dist.all_reduce(torch.ones(2), async_op=True) for _ in range(2))
        failed = first.get_future().then(raises(error))
        with pytest.raises(RuntimeError, match=type(error).__name__):
            failed.wait()
        assert second.get_future().then(lambda future: 5).wait() == 5
        works()


def in_one_job(file):
    begin(file)
    kept = unfinished(), trained(sparse=True), trained(sparse=False)
    mismatches(kept)
    conversions()
    callbacks()
    end()


def test_errors_of_completions(pool, tmp_path):
    with pool.ranks(2, init=False, env={"HOROVOD_DEADLOCK_TIME_SECONDS": "1"}) as ranks:
        ranks.run(in_one_job, new_file(tmp_path))


# ---- a group of one process ------------------------------------------------------------------------------------------


@pytest.fixture
def group():
    made = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20))
    yield made
    made.shutdown()


def reduced(group):
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return group.allreduce([torch.ones(2)], options)


def result(future):
    """Waits, for a limited time."""
    until(future.done)
    return future.wait()


def failing(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize("step", ["_complete", "_complete_future", "_is_awaited_by_hook"])
def test_thread_of_futures_survives_a_defect(group, step):
    """Whatever goes wrong with one work, the thread completes the futures of the others."""
    work = reduced(group)
    error = LookupError("a defect")
    setattr(work, step, failing(error))
    future = work.get_future()
    other = reduced(group).get_future()
    assert result(other)[0].tolist() == [1, 1]
    if step == "_complete":
        with pytest.raises(RuntimeError, match="a defect"):
            result(future)
    assert group._operations._thread.is_alive()


def test_future_without_a_thread(group, monkeypatch):
    """A process that cannot start a thread waits for the operation itself, and tries again for the next one."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing(RuntimeError("can't start new thread")))
        future = reduced(group).get_future()
        assert future.done()
    assert result(reduced(group).get_future())[0].tolist() == [1, 1]


def test_bucket_is_named_as_far_as_possible(group, monkeypatch):
    """Naming the parameters of a bucket looks at objects of the program, which may raise."""
    model = DistributedDataParallel.__new__(DistributedDataParallel)  # has no attributes
    with contextlib.suppress(AttributeError):
        assert model.process_group is None
    error = dist.DistBackendError("rank 0: it failed")
    for bucket in (torch.ones(4), torch.eye(3).to_sparse(), torch.ones(2, device="meta")):
        assert str(group._operations.named(error, bucket)) == "rank 0: it failed"
    monkeypatch.setattr(operations, "parameters_in_bucket", lambda *_: "a.weight")
    named = group._operations.named(error, torch.ones(4))
    assert str(named) == "rank 0: it failed (gradients of a.weight)"
    conversion = UnicodeDecodeError("utf-8", b"", 0, 1, "of another class")
    assert group._operations.named(conversion, torch.ones(4)) is conversion


def test_all_parts_of_a_group_end(monkeypatch):
    """A part that cannot be ended keeps neither the others, nor the other groups of the process, from ending."""
    first, second = (ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20)) for _ in range(2))
    monkeypatch.setattr(first._connections, "close", failing(OSError("a defect")))
    ended = []
    monkeypatch.setattr(first._operations, "close", lambda: ended.append("operations"))
    monkeypatch.setattr(first._delegates, "shutdown", lambda: ended.append("delegates"))
    with pytest.raises(OSError, match="a defect"):
        first.shutdown()
    assert ended == ["operations", "delegates"]
    _open.add(first)
    _shut_down_all()
    assert not any(group in _open for group in (first, second))
