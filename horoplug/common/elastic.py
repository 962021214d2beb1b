"""Elastic training: the state that is committed and restored, and the loop around the training function. The
``elastic`` module of each framework builds on this.

In a job that ``horovodrun --min-np`` has started, processes that fail are replaced, and ``init`` may return with other
ranks and another size. In other jobs, the same ranks initialize again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec, Protocol, TypeVar, cast

from horoplug.base import config
from horoplug.base.errors import HorovodInternalError, HostsUpdatedInterrupt
from horoplug.base.host_updates import HostUpdateResult
from horoplug.base.log import logger
from horoplug.common.basics import initialize_again as initialize_again
from horoplug.common.basics import shutdown
from horoplug.common.context import context
from horoplug.common.notice import Notice
from horoplug.common.object_state import Kept, broadcast_values, keep, put_back
from horoplug.common.objects import allgather_object, broadcast_object
from horoplug.rendezvous.elastic.messages import HostUpdate

__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

FAILURES_WITHOUT_COMMIT: Final = 10
"""The last of this number of consecutive failures without a commit between them is raised to the program."""

CHECK_SECONDS: Final = 0.1
"""Of commits that follow each other faster than this, only some check for new hosts."""
CHECKS_AT_FIRST: Final = 10
"""The first commits of a membership, which all check."""
MOST_UNCHECKED: Final = 50
"""Commits without a check, at most, between two with one."""


class Listener(Protocol):
    """Receives notifications about hosts, such as a :class:`State`."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts have changed at ``timestamp`` (seconds). ``update_res``: a :class:`HostUpdateResult`."""


class WorkerNotificationManager:
    """Forwards notifications about hosts to the states, in a thread of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[Listener] = set()
        context.on_host_update = self._on_host_update

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Start to listen to the launcher. (The arguments are Horovod's.)"""

    def register_listener(self, listener: Listener) -> None:
        """Notify ``listener`` from now on."""
        with self._lock:
            self._listeners.add(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Stop notifying ``listener``."""
        with self._lock:
            self._listeners.discard(listener)

    def check(self) -> HostUpdate | None:
        """Make a check for an update of an elastic job, in which all ranks make the same ones, and tell the launcher if
        this process was told to leave. Returns the update if all ranks stop at this check."""
        return context.host_update(leaves=notice.is_given())

    def _on_host_update(self, update: HostUpdate) -> None:
        if update.change:
            self.handle_hosts_updated(update.timestamp, update.change)

    def handle_hosts_updated(
        self, timestamp: float, update_res: int = HostUpdateResult.no_update
    ) -> None:
        """Notify all listeners that hosts have changed. ``timestamp``: seconds, which order the notifications. An
        exception of a listener is raised when all have been notified."""
        with self._lock:
            listeners = list(self._listeners)
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.callback(listener.on_hosts_updated, timestamp, update_res)


notification_manager = WorkerNotificationManager()
notice = Notice()


class CheckPace:
    """Decides on rank 0 how many commits follow without a check for new hosts.

    In a check all ranks wait for rank 0, which takes a considerable part of a step of a few milliseconds."""

    def __init__(self) -> None:
        self._checks = 0
        self._unchecked = 0
        self._time = 0.0

    def next_unchecked(self) -> int:
        """Called at each check. Returns the number of commits without one that follow."""
        now = time.monotonic()
        seconds = (now - self._time) / (self._unchecked + 1)  # for each commit since the last check
        self._time = now
        self._checks += 1
        if self._checks > CHECKS_AT_FIRST:
            wanted = int(CHECK_SECONDS / max(seconds, 1e-6))
            self._unchecked = min(wanted, 2 * self._unchecked + 1, MOST_UNCHECKED)
        return self._unchecked


class State:
    """The state of a training run. Derive from it for your own kind of state.

    ``bcast_object``: broadcasts an object of rank 0; ``get_rank``: returns the rank of this process.

    Example, on two ranks:

        class Steps(horoplug.common.elastic.State):
            def __init__(self):
                super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
                self.steps = self.saved = 0

            def save(self):
                self.saved = self.steps

            def restore(self):
                self.steps = self.saved

            def sync(self):
                self.steps = hvd.broadcast_object(self.steps)

        state = Steps()
        state.steps = 3
        state.commit()
        state.steps = 5
        state.restore()
        state.steps  # -> 3
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._notice_callbacks: list[Callable[[], Any]] = []
        self._commits = 0
        self._pace = CheckPace()
        self._unchecked = 0  # calls of check_host_updates that do nothing; the same on all ranks

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call these functions, in this order, after each new ``init`` (for example to scale the learning rate)."""
        self._reset_callbacks.extend(callbacks)

    def register_notice_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call these functions, in this order, on all ranks and at the same commit, when the whole job has to end since
        ``horovodrun`` was told so (HOROPLUG_NOTICE_SIGNAL); for example to write a checkpoint. Then the program ends,
        by SystemExit."""
        self._notice_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after each new ``init``, before the state is synchronized."""
        self._host_messages = queue.Queue()
        self._pace = CheckPace()
        self._unchecked = 0
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Called when hosts have changed, in any thread. In an elastic job, another thread than the program's calls it
        at once, also while the program waits or computes; the next commits then stop all ranks."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, which is restored after a failure, and check for new hosts (:meth:`check_host_updates`).

        Collective: all ranks call it at the same point."""
        self.save()
        self._commits += 1
        context.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks, in the same call, if hosts have changed. Collective.

        In a job that ``horovodrun --min-np`` has started, the launcher tells all ranks, and nothing is sent while
        nothing changes. In other jobs, the program notifies rank 0. If calls follow each other fast, rank 0 decides
        that some of them do nothing, and a notification is raised after about CHECK_SECONDS."""
        if context.is_elastic:
            found = notification_manager.check()
            if found is None:
                return
            if found.ends:
                self._end_on_notice()
            raise HostsUpdatedInterrupt  # who must synchronise is known with the next membership
        if self._unchecked:
            self._unchecked -= 1
            return
        before = newest = self._last_updated_timestamp
        changes = int(HostUpdateResult.no_update)
        with contextlib.suppress(queue.Empty):
            while True:  # other threads of the program may take messages, too
                timestamp, change = self._host_messages.get_nowait()
                if timestamp > newest:
                    newest = timestamp
                    changes |= change
        update = before, newest, changes, self._pace.next_unchecked()
        before, newest, changes, self._unchecked = self._bcast_object(update)
        self._last_updated_timestamp = newest
        if newest > before:
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed)

    def _end_on_notice(self) -> NoReturn:
        for callback in self._notice_callbacks:
            callback()
        shutdown()
        raise SystemExit(0)

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state from the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast the state of rank 0. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new number of ranks; called before :meth:`sync`."""


class ObjectState(State):
    """Python objects as a state: each keyword argument (``kwargs``) becomes an attribute, which may be assigned to.

    ``bcast_object``, ``get_rank``: see :class:`State`.

    ``save`` copies nested dicts, lists, sets and tuples. Generators of random numbers, of Python, NumPy and the
    frameworks, stay where they are: their states are saved, restored and sent. Of other objects ``save`` keeps a
    reference, so their internal changes are not undone. ``sync`` broadcasts the state that was saved last, pickled, and
    raises ValueError on all ranks if that is not possible.

    Example, on two ranks:

        state = horoplug.common.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0)
        state.epoch = hvd.rank()
        state.commit()
        state.sync()
        state.epoch  # -> 0
    """

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        self._saved_state = {name: self._keep(value) for name, value in kwargs.items()}
        for name, value in kwargs.items():
            setattr(self, name, value)

    if TYPE_CHECKING:  # the attributes are the caller's

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self) -> None:
        self._saved_state = {name: self._keep(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        for name, value in self._saved_state.items():
            self._put_back(name, value)

    def sync(self) -> None:
        self._sync_from(0)

    def _sync_from(self, root_rank: int) -> None:
        """Broadcast the state of a rank. Collective."""
        if self._saved_state:
            self._saved_state = self._broadcast(self._saved_state, root_rank)
            ObjectState.restore(self)

    def _broadcast(self, values: Mapping[str, Any], root_rank: int = 0) -> dict[str, Any]:
        """Broadcast values of attributes. Collective."""

        def is_root() -> bool:
            return self._rank() == root_rank

        return broadcast_values(self._bcast_object, values, root_rank, is_root=is_root)

    def _keep(self, value: Any) -> Any:
        """What ``save`` keeps of an attribute."""
        kept = keep(value)
        return self._copy(value) if kept is None else kept

    def _put_back(self, name: str, value: Any) -> None:
        """Give an attribute what ``save`` has kept of it."""
        if isinstance(value, Kept):
            put_back(name, getattr(self, name, None), value)
        else:
            setattr(self, name, self._copy(value))

    def _copy(self, value: Any) -> Any:
        """What ``save`` and ``restore`` keep of an attribute's value."""
        kind = type(value)
        if kind is dict:
            return {key: ObjectState._copy(self, entry) for key, entry in value.items()}
        if kind in (list, tuple, set):
            return kind(ObjectState._copy(self, entry) for entry in value)
        return value


def run_fn(
    func: Callable[Parameters, Result],
    reset: Callable[[], Any],
    is_failure: Callable[[BaseException], bool] | None = None,
) -> Callable[Parameters, Result]:
    """Wrap ``func(state, ...)`` in a loop that continues after failures. The ``elastic.run`` of a framework uses it.

    The state is synchronized before ``func`` runs. On HorovodInternalError the last committed state is restored; on
    HostsUpdatedInterrupt the current state is kept. Then ``reset`` initializes the ranks again, they synchronize the
    state unless all of them have kept it, and ``func`` is called again. Other exceptions propagate. So does
    HorovodInternalError when FAILURES_WITHOUT_COMMIT of them have occurred in a row without a commit. ``is_failure``:
    whether an exception of a framework means the same as HorovodInternalError; such an exception is raised as
    HorovodInternalError."""

    call: Callable[..., Any] = func

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        notification_manager.init()
        notification_manager.register_listener(state)
        notice.watch(config.value("NOTICE_SIGNAL"), config.value("NOTICE_FILE"))
        is_common = is_interrupted = must_reset = False  # is_common: all ranks have this state
        failures, commits = 0, _commits(state)
        try:
            while True:
                try:
                    with _failures(is_failure):
                        if is_interrupted:
                            # There may have been no commit, and sync() sends what was saved.
                            state.save()
                            is_interrupted = False
                        if must_reset:
                            context.keeps_state = is_common
                            reset()
                            is_common = not _must_sync(is_common)
                            state.on_reset()
                            must_reset = False
                        if not is_common:
                            state.sync()
                            is_common = context.has_state = True
                        return call(state, *args, **kwargs)
                except HorovodInternalError as error:
                    if _commits(state) != commits:
                        failures, commits = 0, _commits(state)
                    failures += 1
                    if failures >= FAILURES_WITHOUT_COMMIT:
                        raise
                    logger.warning("elastic: restoring the last commit after: %s", error)
                    state.restore()
                    is_common = is_interrupted = False
                except HostsUpdatedInterrupt as interrupt:
                    is_interrupted = True
                    is_common = is_common and (interrupt.skip_sync or context.is_elastic)
                must_reset = True
        finally:
            notification_manager.remove_listener(state)

    return cast(Callable[Parameters, Result], wrapper)


def _must_sync(keeps_state: bool) -> bool:
    """Whether all ranks of a job that was formed again must synchronize the state: the same on all ranks. Collective.

    ``keeps_state``: whether this rank has the state with which all were interrupted. A failure may have kept others
    from that, and new processes have no state."""
    if context.is_elastic:
        return context.must_sync
    return not (all(allgather_object(keeps_state)) if context.initialized else keeps_state)


def check_alike(parts: Mapping[str, str]) -> None:
    """Raise ValueError on a rank of an elastic job whose state has other arrays than that of rank 0, as a replacement
    has whose program was changed. The launcher then uses its host no more. Collective.

    ``parts``: the type and shape of each array by its name; empty: unknown."""
    if not context.is_elastic:
        return
    packed = json.dumps(sorted(parts.items())).encode()
    if len(set(allgather_object(hashlib.sha256(packed).digest()))) == 1:
        return
    reference: Mapping[str, str] = broadcast_object(parts)
    difference = _difference(parts, reference) if parts and reference else ""
    if difference:
        context.report_mismatch(difference)
        raise ValueError(difference)


def variable_parts(variables: Iterable[Any]) -> dict[str, str]:
    """The argument of :func:`check_alike` for variables of TensorFlow or Keras, whose names can differ by rank."""
    found = {}
    for number, variable in enumerate(variables):
        kind = getattr(variable.dtype, "name", variable.dtype)
        found[f"variable {number}"] = f"{kind} {list(variable.shape)}"
    return found


def _difference(parts: Mapping[str, str], reference: Mapping[str, str]) -> str:
    for name, expected in reference.items():
        if name not in parts:
            return f"the state has no {name}, and that of rank 0 has"
        if parts[name] != expected:
            return f"the state's {name} is {parts[name]}, and that of rank 0 is {expected}"
    further = next((name for name in parts if name not in reference), "")
    return f"the state has {further}, and that of rank 0 has not" if further else ""


@contextlib.contextmanager
def _failures(is_failure: Callable[[BaseException], bool] | None) -> Iterator[None]:
    """Raise exceptions that are failures, or were raised because of one, as HorovodInternalError."""
    try:
        yield
    except (HorovodInternalError, HostsUpdatedInterrupt):
        raise
    except Exception as error:
        # Cleaning up after a failure may fail as well and hide the failure.
        cause: BaseException | None = error
        while is_failure is not None and cause is not None:
            if isinstance(cause, HorovodInternalError) or is_failure(cause):
                raise HorovodInternalError(str(cause)) from error
            cause = cause.__cause__ or cause.__context__
        raise


def _commits(state: Any) -> int:
    return getattr(state, "_commits", 0)  # a user's state may not call State.__init__
