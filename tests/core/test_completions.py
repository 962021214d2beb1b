"""What completes an operation, and what runs in a thread, may raise: the error reaches whoever waits, and nothing else
is affected."""

import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import horoplug as hvd
from horoplug.base.config import Config
from horoplug.base.errors import HorovodInternalError
from horoplug.common.context import context
from horoplug.common.elastic import notification_manager
from horoplug.common.ops import Operation
from horoplug.numpy.adapter import NumpyAdapter
from horoplug.rendezvous.elastic.member import ElasticMember
from horoplug.rendezvous.elastic.messages import Membership
from horoplug.rendezvous.store import report
from horoplug.runner.elastic.inbox import DiscoveryThread
from horoplug.runner.run import RankError
from horoplug.spark.elastic import _Slots
from horoplug.spark.service import Joined
from tests.harness.limits import scaled
from tests.harness.support import until

pytest_plugins = ["tests.harness.jobs"]


def failing(error):
    def function(*_, **__):
        raise error

    return function


# ---- results of asynchronous operations ------------------------------------------------------------------------------


def frameworks():
    import torch

    import horoplug.torch as of_torch
    from horoplug.torch.adapter import TorchAdapter

    return [(hvd, np.ones, NumpyAdapter), (of_torch, torch.ones, TorchAdapter)]


def results_that_cannot_be_converted():
    """The error is raised once, the handle is free, and its name can be used again."""
    for module, ones, adapter in frameworks():
        for error in (MemoryError("for the result"), HorovodInternalError("for the result")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(adapter, "from_memory", failing(error))
                handle = module.allgather_async(ones(3), name="rows")
                with pytest.raises(type(error), match="for the result"):
                    module.synchronize(handle)
            assert not context.operations
            assert module.synchronize(handle) is None
            assert len(module.allgather(ones(3), name="rows")) == 3 * hvd.size()


def copies_that_fail():
    """An in-place operation on a tensor that is not contiguous, whose result cannot be copied back."""
    for module, ones, adapter in frameworks()[1:]:  # NumPy's arrays must be contiguous
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "copy_back", failing(BufferError("of the result")))
            with pytest.raises(BufferError, match="of the result"):
                module.allreduce_(ones((4, 3)).T, name="back")
            handle = module.allreduce_async_(ones((4, 3)).T, name="back")
            with pytest.raises(BufferError, match="of the result"):
                module.synchronize(handle)
        assert not context.operations
        assert module.allreduce_(ones((4, 3)).T, name="back")[0, 0] == 1


def interrupted_in(operation):
    wait = Operation.wait

    def waits(self):
        if self is operation:
            raise KeyboardInterrupt
        return wait(self)

    return waits


def groups_in_parts():
    """A group of two dtypes is two operations. The second one is waited for although the first one fails, and an
    interrupt loses no result."""
    for module, ones, adapter in frameworks():
        tensors = [ones(2), ones(3) > 0]
        convert, failures = adapter.from_memory, [MemoryError("for the first part")]

        def once(self, *arguments, convert=convert, failures=failures):
            if failures:
                raise failures.pop()
            return convert(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "from_memory", once)
            handle = module.grouped_allgather_async(tensors, name="parts")
            with pytest.raises(MemoryError, match="for the first part"):
                module.synchronize(handle)
        assert not context.operations
        handle = module.grouped_allgather_async(tensors, name="parts")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Operation, "wait", interrupted_in(context.find(handle).operations[1]))
            with pytest.raises(KeyboardInterrupt):
                module.synchronize(handle)
        assert [len(each) for each in module.synchronize(handle)] == [
            2 * hvd.size(),
            3 * hvd.size(),
        ]
        assert not context.operations


def sparse_gradients_that_cannot_be_made():
    """The optimizer waits for all gradients, also after one has failed."""
    import torch

    import horoplug.torch as of_torch

    tables = torch.nn.ModuleList(torch.nn.Embedding(5, 2, sparse=True) for _ in range(3))
    optimizer = of_torch.DistributedOptimizer(
        torch.optim.SGD(tables.parameters(), lr=1.0), tables.named_parameters()
    )
    for _ in range(2):
        sum(table(torch.tensor([of_torch.rank()])).sum() for table in tables).backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "sparse_coo_tensor", failing(ArithmeticError("of the result")))
            with pytest.raises(ArithmeticError, match="of the result"):
                optimizer.step()
        assert not context.operations
        optimizer.zero_grad()


CHECKS = (
    results_that_cannot_be_converted,
    copies_that_fail,
    groups_in_parts,
    sparse_gradients_that_cannot_be_made,
)


def test_results(pool):
    with pool.ranks(2) as ranks:
        for check in CHECKS:
            ranks.run(check)


# ---- threads and listeners -------------------------------------------------------------------------------------------


def test_every_listener_is_notified(monkeypatch):
    heard = []
    good = SimpleNamespace(on_hosts_updated=lambda *update: heard.append(update))
    bad = SimpleNamespace(on_hosts_updated=failing(ArithmeticError("of a listener")))
    monkeypatch.setattr(notification_manager, "_listeners", [good, bad, good])
    with pytest.raises(ArithmeticError, match="of a listener"):
        notification_manager.handle_hosts_updated(5.0, 1)
    assert heard == [(5.0, 1)] * 2


@pytest.mark.parametrize("error", [SystemExit(2), KeyError("hosts"), KeyboardInterrupt()])
def test_search_for_hosts_goes_on_after_any_exception(error, monkeypatch):
    monkeypatch.setattr("horoplug.runner.elastic.inbox.DISCOVERY_SECONDS", 0.01)
    found = queue.SimpleQueue()
    answers = [failing(error), lambda: {"a": 2}]
    discovery = SimpleNamespace(
        find_available_hosts_and_slots=lambda: (
            answers.pop(0)() if len(answers) > 1 else answers[0]()
        )
    )
    thread = DiscoveryThread(discovery, found.put)
    try:
        first, second = found.get(timeout=scaled(20)), found.get(timeout=scaled(20))
    finally:
        thread.close()
    assert isinstance(first, Exception)
    assert type(error).__name__ in repr(first)
    assert second == {"a": 2}


def test_member_that_cannot_follow_updates_fails_its_next_check():
    """It would otherwise go on for ever in a membership that the launcher wants to end."""

    def get(*_):
        raise LookupError("a defect")

    store = SimpleNamespace(begin_get=get, abandon=lambda _: None)
    member = ElasticMember(store, 3, "1.0", 1.0)
    member.watch(Membership(0, (3,), must_sync=True), lambda: 0.0, lambda update: None)
    member._watch._thread.join(scaled(20))
    for _ in range(2):
        with pytest.raises(HorovodInternalError, match="a defect"):
            member.check()
    member.close()
    assert member.check() is None


def test_report_goes_on_after_a_failure(monkeypatch):
    values = queue.SimpleQueue()
    counters = [failing(RuntimeError("a defect")), lambda: {"tensors": 1, "bytes": 2}]
    client = SimpleNamespace(set=lambda key, value: values.put(value))
    connected = SimpleNamespace(__enter__=lambda self: client, __exit__=lambda *_: None)
    kind = type("Connected", (), vars(connected))
    monkeypatch.setattr(report.StoreClient, "connect", lambda *_, **__: kind())
    config = Config(
        rendezvous_addr="::1", rendezvous_port=1, secret_key=b"x" * 32, status_seconds=0.01
    )
    running = report.Report(
        config, lambda: counters.pop(0)() if len(counters) > 1 else counters[0]()
    )
    try:
        assert values.get(timeout=scaled(20))
    finally:
        running.close()


def test_event_of_spark_that_cannot_be_handled_ends_the_job():
    """The thread of the events would end, and the job wait for ever."""
    slots = _Slots(SimpleNamespace(events=queue.Queue()), None, SimpleNamespace(env=None))
    abandoned = queue.SimpleQueue()
    slots._job = SimpleNamespace(
        abandon=abandoned.put, hosts_found=failing(OSError("a full\ndisk"))
    )
    thread = threading.Thread(target=slots._handle_all, daemon=True)
    thread.start()
    for _ in range(2):
        slots._service.events.put(Joined(SimpleNamespace(host="a")))
        error = abandoned.get(timeout=scaled(20))
        assert isinstance(error, RankError)
        assert str(error).startswith("horoplug.spark: ")
        assert "\n" not in str(error)
    slots._is_over = True
    thread.join(scaled(20))
    until(lambda: not thread.is_alive())
