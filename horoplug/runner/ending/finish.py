"""How a job has ended, as an object: each front end puts it into its own words."""

from __future__ import annotations

import dataclasses
import enum

from horoplug.runner.terms import Terms


class Why(enum.Enum):
    """Why a job has ended. The value is the text, with the terms of :class:`Terms` and fields of :class:`Finish`."""

    OVER = ""
    """All processes have ended, or the failure of one has no further reason."""
    NOTICED = "the job has ended because it was told to"
    STOPPED = "the job was stopped"
    RESETS = "the job was formed again {count} ({resets})"
    LOSSES = "the job has failed {count} in a row soon after its start"
    NO_PROGRESS = "the job has failed {count} in a row without a commit between"
    NEVER_BEGUN = "{count} have failed before init() returned"
    TOO_FEW_LEFT = "fewer than {count} ({minimum}) are left"
    TOO_FEW_READY = "fewer than {count} ({minimum}) were ready for {seconds:g} s ({timeout})"


@dataclasses.dataclass(frozen=True)
class Finish:
    """How an elastic job has ended. ``code``: 0, or the exit code of a failure; ``cause``: the first failure, in one
    line that names nothing of a front end, empty without one; ``process``: the process that has failed, None if it was
    a host; ``count``, ``seconds``: the numbers of the reason."""

    code: int = 0
    why: Why = Why.OVER
    cause: str = ""
    process: int | None = None
    count: str = ""
    seconds: float = 0.0

    def text(self, terms: Terms) -> str:
        """Why the job has failed, in one line; empty if it has not."""
        named = dataclasses.asdict(terms)
        reason = self.why.value.format(count=self.count, seconds=self.seconds, **named)
        return "; ".join(part for part in (reason, self.cause) if part)


def count(number: int, one: str, more: str) -> str:
    """A number of things: ``1 process``, ``2 processes``."""
    return f"{number} {one if number == 1 else more}"
