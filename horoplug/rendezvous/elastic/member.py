"""A process of an elastic job: its conversation with the launcher (horoplug/rendezvous/elastic/messages.py)."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Final

from horoplug.base.errors import HorovodInternalError, RendezvousError
from horoplug.base.host_updates import HostUpdateResult
from horoplug.rendezvous.elastic.messages import (
    Checks,
    HostUpdate,
    Leaving,
    Membership,
    Message,
    Mismatch,
    Pace,
    Ready,
    answer_key,
    message_key,
    pack_message,
    stop_key,
    unpack_update,
    update_key,
)
from horoplug.rendezvous.elastic.stop_point import StopPoint
from horoplug.rendezvous.store.client import PendingGet, StoreClient

_FOREVER: Final = 1e6  # seconds, 11 days: the launcher answers earlier, or its connection ends
_END_SECONDS: Final = 5.0
"""A launcher that does not answer for so long is about to be reported as lost."""


class DismissedError(RendezvousError):
    """The launcher does not need this process any more; it should end without an error."""


class ElasticMember:
    """A process of an elastic job."""

    def __init__(self, store: StoreClient, process: int, version: str, pace_seconds: float) -> None:
        """``process``: the number that the launcher has given this process; ``version``: of its horoplug;
        ``pace_seconds``: seconds between two reports of its pace."""
        self._store = store
        self._process = process
        self._version = version
        self._pace_seconds = pace_seconds
        self._attempt = 0
        self._leaving = False
        self._watch: _UpdateWatch | None = None

    def join(self, commits: int, *, has_state: bool, keeps_state: bool) -> Membership:
        """Wait until this process is a member of the next membership, for as long as the launcher lives.

        ``commits``: how often the program has committed a state since the last call; ``has_state``: whether it has had
        the state of the training; ``keeps_state``: whether it has kept the state with which it has left the last
        membership. Errors: DismissedError if the process is not needed any more; RendezvousError if the launcher
        refuses it, or has ended."""
        kept = keeps_state and self._watch is not None and self._watch.has_stopped
        self.close()
        self._attempt += 1
        ready = Ready(self._process, self._attempt, self._version, commits, kept, has_state)
        _say(self._store, ready)
        key = answer_key(self._process, self._attempt)
        (value,) = self._store.get([key], _FOREVER)
        self._store.delete(key)
        answer = json.loads(value)
        if "leave" in answer:
            raise DismissedError(answer["leave"])
        if "error" in answer:
            raise RendezvousError(answer["error"])
        return Membership(
            answer["generation"], tuple(answer["processes"]), must_sync=answer["must_sync"]
        )

    def watch(
        self,
        membership: Membership,
        active_seconds: Callable[[], float],
        on_update: Callable[[HostUpdate], None],
    ) -> None:
        """From now on, learn of updates of this membership, until the next :meth:`join`.

        ``active_seconds``: for how many seconds operations have been in flight; called in another thread.
        ``on_update``: called in another thread as soon as this process learns of the first update. It may take its
        time, and raise what it likes."""
        self._watch = _UpdateWatch(
            self._store,
            self._process,
            membership.generation,
            active_seconds,
            on_update,
            self._pace_seconds,
        )

    def leave(self) -> None:
        """Tell the launcher, once, that this process was told to leave. Errors: RendezvousError."""
        if not self._leaving:
            self._leaving = True
            _say(self._store, Leaving(self._process))

    def report_mismatch(self, reason: str) -> None:
        """Tell the launcher that this process ends because its state is another one. Errors: RendezvousError."""
        _say(self._store, Mismatch(self._process, reason))

    def check(self) -> HostUpdate | None:
        """Make a check for updates. Returns the update if all members stop at this check. Errors: HorovodInternalError
        if the launcher does not say whether they do."""
        return None if self._watch is None else self._watch.check()

    def close(self) -> None:
        """Learn of no more updates. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()


def _say(store: StoreClient, message: Message) -> None:
    store.set(message_key(message), pack_message(message))


def _in_thread(function: Callable[[HostUpdate], None], update: HostUpdate) -> None:
    name = "horoplug-host-update"
    thread = threading.Thread(target=function, args=(update,), name=name, daemon=True)
    with contextlib.suppress(RuntimeError):  # too many threads; the next commit tells the program
        thread.start()


class _UpdateWatch:
    """Takes part in the agreement at which check the members stop, and reports this process's pace, in a thread."""

    def __init__(
        self,
        store: StoreClient,
        process: int,
        generation: int,
        active_seconds: Callable[[], float],
        on_update: Callable[[HostUpdate], None],
        pace_seconds: float,
    ) -> None:
        self._store = store
        self._process = process
        self._generation = generation
        self._active_seconds = active_seconds
        self._on_update = on_update
        self._pace_seconds = pace_seconds
        self._began = time.monotonic()
        self._update: HostUpdate | None = None
        self._point = StopPoint()
        self._lock = threading.Lock()
        self._pending: PendingGet | None = None
        self._is_over = False
        self._failure: Exception | None = None
        self.has_stopped = False
        """Whether the program has made the check at which all members stop."""
        self._thread = threading.Thread(target=self._run, name="horoplug-elastic", daemon=True)
        self._thread.start()

    def check(self) -> HostUpdate | None:
        """Make a check. Returns the update if all members stop at it. Errors: HorovodInternalError if the thread has
        failed, or if the launcher does not say whether they do: the membership then has to be formed again."""
        if self._failure is not None:
            raise HorovodInternalError(
                f"this process does not learn of new hosts any more: {self._failure}"
            ) from self._failure
        self.has_stopped = self._point.check()
        return self._update if self.has_stopped else None

    def close(self) -> None:
        """End the thread, which may be talking to the launcher."""
        with self._lock:
            self._is_over = True
            if self._pending is not None:
                self._store.abandon(self._pending)
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        stop = None
        try:
            for round_number in itertools.count():
                update = unpack_update(self._get(update_key(self._generation, round_number)))
                if update.change == HostUpdateResult.no_update and not update.ends:
                    return  # the membership is over
                is_first, self._update = self._update is None, update
                checks = self._point.announce()
                self._say(Checks(self._process, self._generation, round_number, checks))
                if is_first:
                    # Not in this thread, for which the next check of the program waits.
                    _in_thread(self._on_update, update)
                stop = json.loads(self._get(stop_key(self._generation, round_number)))
                self._point.decide(stop)
                if stop is not None:
                    return
        except RendezvousError:
            pass  # this watch was closed; or the launcher has ended, which other parts report
        except Exception as error:
            self._failure = error
        finally:
            self._point.decide(stop)

    def _get(self, key: str) -> bytes:
        with self._lock:
            if self._is_over:
                raise RendezvousError("the watch was closed")
            self._pending = pending = self._store.begin_get([key], _FOREVER)
        while (values := self._store.wait_get_for(pending, self._pace_seconds)) is None:
            elapsed = time.monotonic() - self._began
            self._say(Pace(self._process, self._generation, elapsed, self._active_seconds()))
        return values[0]

    def _say(self, message: Message) -> None:
        """Tell the launcher. One that is suspended gets the message later. If it has ended, the next get fails."""
        with contextlib.suppress(RendezvousError):
            _say(self._store, message)
