"""Follows the processes of a job's ranks, and decides how the job ends: its exit code, its last line, its time limit.

No clock and no I/O: the caller passes the time and sends the commands to the agents."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

from horoplug.runner.agent.agent import KILL, TERMINATE

from .blame import Blame, describe

_NO_RANKS_SECONDS = 2.0  # limit for agents to end if no rank has started
_END_SECONDS = 12.0  # limit for an agent to end all processes, beyond the grace period


class Outcome:
    """The outcome of one job. The first failure or signal sets it; :attr:`is_ending` is true from then on."""

    def __init__(self, size: int, grace: float) -> None:
        """``size``: number of ranks; ``grace``: seconds between SIGTERM and SIGKILL."""
        self.started: set[int] = set()
        """Ranks whose process was started."""
        self.ended: set[int] = set()
        """Ranks whose process has ended."""
        self.deadline: float | None = None
        """The time by which every agent has to end (``time.monotonic()``); None while the job is not ending."""
        self._grace = grace
        self._blame = Blame(range(size))
        self.process: int | None = None
        """The rank, or the process of an elastic job, that has failed first; None: none has, or its host is lost."""
        self._cause: tuple[str, int] | None = None  # last line and exit code
        self._can_run = False
        self._signals = 0

    # ---- what has happened -------------------------------------------------------------------------------------------

    def ranks_can_run(self) -> None:
        """Record that ranks may have been started by now: the address of their rendezvous is known."""
        self._can_run = True

    def rank_ended(
        self,
        rank: int,
        code: int,
        now: float,
        *,
        departures: Sequence[int],
        present: int,
        may_be_lost: bool = False,
    ) -> None:
        """Record that a rank's process has ended. The arguments are those of :meth:`.blame.Blame.ended`."""
        self.ended.add(rank)
        if self.is_ending:
            self._blame.lost([rank])
        else:
            self._blame.ended(rank, code, departures, now, present=present, may_be_lost=may_be_lost)

    def ranks_lost(self, ranks: Iterable[int]) -> None:
        """Record that the ends of these ranks will not be reported."""
        self._blame.lost(ranks)

    def fail(
        self,
        text: str,
        now: float,
        code: int = 1,
        *,
        all_ranks: bool = False,
        process: int | None = None,
    ) -> None:
        """End the job because of a failure, unless it is ending already.

        ``text``: what failed; ``code``: the launcher's exit code; ``all_ranks``: the failure is not that of one rank,
        so that the last line says that all ranks were ended; ``process``: see :attr:`process`."""
        if self._cause is None:
            self.process = process
            whose = ""
            if self._can_run:
                others = "; the other ranks were ended" if self._blame.running else ""
                whose = "; all ranks were ended" if all_ranks else others
            self._cause = text + whose, code
        self._limit(now)

    def fail_first_rank(self, now: float) -> None:
        """End the job because of the rank that failed first; see :attr:`due`."""
        code = self._blame.code
        text = f"rank {self._blame.first} {describe(code)}"
        self.fail(text, now, code if code >= 0 else 128 - code, process=self._blame.first)

    def interrupt(self, number: int, now: float) -> bytes:
        """End the job because the launcher has got a signal. Returns the command for the agents.

        The second signal does not wait for the grace period. Callable from signal handlers."""
        self._signals += 1
        if self._cause is None:
            name = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}.get(
                signal.Signals(number), f"ended by {signal.Signals(number).name}"
            )
            self._cause = f"{name}; all ranks were ended", 128 + number
        self._limit(now)
        return TERMINATE if self._signals == 1 else KILL

    def output_closed(self) -> None:
        """End the job because the reader of its output has ended, as in ``horovodrun ... | head``."""
        self._cause = "", 128 + signal.SIGPIPE

    def _limit(self, now: float) -> None:
        if self.deadline is None:
            self.deadline = now + (
                self._grace + _END_SECONDS if self._can_run else _NO_RANKS_SECONDS
            )

    # ---- what follows from it ----------------------------------------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        """Whether the job has failed or was interrupted."""
        return self._cause is not None

    @property
    def due(self) -> float | None:
        """The time for :meth:`fail_first_rank` (``time.monotonic()``); None if no rank has failed."""
        return self._blame.due

    @property
    def signals(self) -> int:
        """The number of signals that the launcher has got."""
        return self._signals

    @property
    def verdict(self) -> str:
        """One line that tells why the job has failed; empty if it has not."""
        return self._cause[0] if self._cause is not None else ""

    @property
    def code(self) -> int:
        """The launcher's exit code."""
        return self._cause[1] if self._cause is not None else 0
