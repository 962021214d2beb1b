"""An elastic job whose processes are started by something else than the launcher's agents: actors of Ray or tasks of
Spark.

The caller implements :class:`horoplug.runner.elastic.driver.Workers`, which starts and ends the processes, and reports
how they end. :class:`ElasticWorkerJob` serves the rendezvous in the caller's process and decides the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from .elastic.discovery import HostDiscovery
from .elastic.driver import ElasticDriver, Workers
from .elastic.roster import Limits, Start
from .elastic.stragglers import Pacing
from .ending.finish import Finish, Why
from .environment import elastic_environment
from .worker_job import ServedJob

_STOPPED = Finish(1, Why.STOPPED)


class ElasticWorkerJob(ServedJob):
    """One elastic job. :meth:`run` drives it, in any thread; the methods that report what has
    happened may be called in all threads, also before :meth:`run`."""

    def __init__(
        self,
        workers: Workers,
        limits: Limits,
        slots: Mapping[str, int],
        address: str | None = None,
        *,
        discovery: HostDiscovery | None = None,
        cooldown_range: tuple[float, float] | None = None,
        pacing: Pacing | None = None,
        settings: Mapping[str, str] | None = None,
        interface: str | None = None,
        secret: bytes | None = None,
    ) -> None:
        """``slots``, ``discovery``, ``cooldown_range``, ``pacing``: see
        :class:`horoplug.runner.elastic.driver.ElasticDriver`; ``address``, ``settings``, ``interface``, ``secret``: see
        :class:`horoplug.runner.worker_job.ServedJob`. Errors: OSError if the address cannot be bound."""
        super().__init__(address, settings, interface, secret)
        self._driver = ElasticDriver(
            workers,
            limits,
            slots,
            discovery=discovery,
            cooldown_range=cooldown_range,
            pacing=pacing,
        )
        self._lock = threading.Lock()
        self._hosts: dict[int, str] = {}  # of the live processes
        self._stopped: Finish | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the processes of the current membership, by rank."""
        return self._driver.members

    def environment(self, start: Start) -> dict[str, str]:
        """The variables of a process, which :func:`horoplug.runner.worker_job.enter` sets. They include the job's
        secret: see :meth:`horoplug.runner.worker_job.WorkerJob.environment`. Call it once for each process."""
        with self._lock:
            self._hosts[start.process] = start.host
            size = len(self._hosts)
        ranks = self._driver.most_on(start.host)
        return self._environment(size, start.host) | elastic_environment(
            *(start.process, start.slot, start.local_slot, start.restarts, size, ranks)
        )

    # ---- reports, in any thread --------------------------------------------------------------------------------------

    def ended(
        self, process: int, code: int, text: str, slots: Mapping[str, int] | None = None
    ) -> None:
        """A process has ended. ``code``: 0, or an exit code; ``text``: how, as it follows "process 3"; ``slots``: if
        its slot is gone, too, what :meth:`hosts_found` gets. A process whose end is reported twice, or whose host is
        lost, is ignored."""
        with self._lock:
            known = self._hosts.pop(process, None) is not None

        def handle() -> None:
            if known:
                self._driver.ended(process, code, text)
            if slots is not None:
                self._driver.inbox.put(dict(slots))  # handled before anything is decided

        self._driver.inbox.put(handle)

    def host_lost(self, host: str, why: str) -> None:
        """A host is lost, with its processes. ``why``: one line."""
        with self._lock:
            self._hosts = {number: each for number, each in self._hosts.items() if each != host}
        self._driver.inbox.put(lambda: self._driver.host_lost(host, why))

    def hosts_found(self, slots: Mapping[str, int]) -> None:
        """The hosts have changed: those that the job may use from now on, and their slots. For a caller that is told of
        hosts, and gives no ``discovery``."""
        self._driver.inbox.put(dict(slots))

    def stop(self, finish: Finish = _STOPPED) -> None:
        """Let :meth:`run` return this at once. The caller ends the processes."""
        self._driver.inbox.put(lambda: self._stop(finish))

    def _stop(self, finish: Finish) -> None:
        self._stopped = self._stopped or finish

    def abandon(self, error: BaseException) -> None:
        """Let :meth:`run` raise this error: there are no hosts any more, and none will come."""

        def give_up() -> None:
            raise error

        self._driver.inbox.put(give_up)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> Finish:
        """Drive the job until it is over. Returns how it has ended; if it has failed, processes may still run."""
        self._driver.listen(self._server)
        self._driver.begin()
        while True:
            outcome = self.step()
            if outcome is not None:
                return outcome
            due = self._driver.due
            self._driver.inbox.wait(None if due is None else max(due - time.monotonic(), 0) + 0.001)

    def step(self) -> Finish | None:
        """Do what is to be done now. Returns how the job has ended, None: it has not."""
        self._driver.handle_events()
        while self._stopped is None and self._driver.outcome is None and self._driver.advance():
            pass
        return self._stopped or self._driver.outcome

    def close(self) -> None:
        """Stop serving the rendezvous. Idempotent."""
        self._driver.close()
        super().close()
