"""Training states that are kept in place: after a failure, processes go on with their parameters, without returning to
a commit.

Parameters change only in the update of an optimizer, after all reductions of the step. So a process that has survived a
failure has the parameters of a whole step. A failure can still end a step on some processes and not on others; these
then differ by one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from horoplug.base.log import logger
from horoplug.common.basics import rank
from horoplug.common.elastic import ObjectState
from horoplug.common.objects import allgather_object


class Source(NamedTuple):
    """Where the processes get their state from.

    ``rank``: the process that has got furthest; ``commits``: its number of commits; ``is_needed``: whether any process
    has another state; ``is_ahead``: whether that process has made a step that it has not committed."""

    rank: int
    commits: int
    is_needed: bool
    is_ahead: bool


class Progress:
    """The number of commits of one process, and whether its parameters have changed since the last one."""

    def __init__(self) -> None:
        self.commits = -1
        """Number of commits of the training; -1: this process has no part of its state yet."""
        self._begun = 0
        self._ended = 0
        self._at_commit = 0, 0

    def updates(self) -> tuple[int, int]:
        """How many updates of the parameters this process has begun, and how many it has ended."""
        return self._begun, self._ended

    def commit(self) -> None:
        """The state is that of the last step."""
        self.adopt(self.commits + 1)

    def adopt(self, commits: int) -> None:
        """This process has taken over a state with this number of commits."""
        self.commits = commits
        self._at_commit = self.updates()

    @property
    def is_ahead(self) -> bool:
        """Whether an optimizer has updated parameters since the last commit."""
        return self.updates() != self._at_commit

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are those of a whole step. If not, an update has ended half-way."""
        begun, ended = self.updates()
        return begun - ended == self._at_commit[0] - self._at_commit[1]

    def compare(self) -> Source:
        """Find the process that has got furthest, among those with the parameters of a whole step. Collective.

        Of those, one without a step that is not committed is preferred, since the rest of its state belongs to its
        parameters; then the lowest rank. Raises RuntimeError if there is none, although the training has begun."""
        every: list[tuple[int, bool, bool]]
        every = allgather_object((self.commits, self.is_ahead, self.is_whole))
        known = [(commits if is_whole else -1, is_ahead) for commits, is_ahead, is_whole in every]
        order = sorted(range(len(known)), key=lambda rank: (-known[rank][0], known[rank][1]))
        best = commits, is_ahead = known[order[0]]
        if commits < 0 and any(each[0] >= 0 for each in every):
            raise RuntimeError(
                "elastic: no process has the parameters of a whole step, because an operation failed while all of them "
                "updated parameters; use rollback=True, or run that operation in another function than the update"
            )
        is_needed = commits < 0 or is_ahead or any(each != best for each in known)
        return Source(order[0], commits, is_needed, is_ahead)


class InPlaceState(ObjectState):
    """A state that is kept in place if ``_progress`` is set. The base class of the frameworks' states."""

    _progress: Progress | None = None

    def _copy_own(self) -> Callable[[], None]:
        """Copy the whole state. Returns a function that restores the copy."""
        raise NotImplementedError

    def _receive(self, root_rank: int) -> None:
        """Overwrite the state by that of a rank. Collective."""
        raise NotImplementedError

    def _checksums(self) -> Any:
        """Something that is equal on two ranks if their parameters are equal, bit for bit."""
        raise NotImplementedError

    def save(self) -> None:
        super().save()
        if self._progress is not None:
            self._progress.commit()

    def _sync_from_furthest(self, progress: Progress) -> None:
        """Give all ranks the state of the one that has got furthest, if they have not the same already. Collective."""
        source = progress.compare()
        if source.is_ahead:
            logger.warning(
                "elastic: a step that was made and not committed is repeated; call commit() directly after the "
                "optimizer's step"
            )
        if source.is_needed:
            self._take_over(progress, source.rank, source.commits)
        if not self._is_alike():
            logger.warning(
                "elastic: the parameters of the ranks differ; all take over those of rank 0"
            )
            self._take_over(progress, 0, source.commits)
            if not self._is_alike():
                raise RuntimeError("elastic: the parameters of the ranks differ after a broadcast")

    def _take_over(self, progress: Progress, source: int, commits: int) -> None:
        """Take over the state of a rank. If that fails, a rank that had a state of its own has it again. Collective."""
        has_own = rank() != source and progress.commits >= 0
        restore = self._copy_own() if has_own else None
        try:
            self._receive(source)
        except BaseException:
            if restore is not None:
                restore()
            raise
        progress.adopt(max(commits, 0))

    def _is_alike(self) -> bool:
        """Whether all ranks have the same parameters, bit for bit. Collective."""
        own = self._checksums()
        return all(other == own for other in allgather_object(own))
