"""Sets of ranks that an operation can run on. For now there is one: all of them."""

from collections.abc import Iterable

from horoplug.common.context import context


class ProcessSet:
    """Ranks that operations can be confined to.

    ``process_set_id`` is the set's number in the job, None while it is not registered."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks: list[int] | None = sorted(ranks)
        if not all(isinstance(rank, int) for rank in self._ranks):
            raise ValueError(f"ProcessSet takes the ranks as integers, got {self._ranks}.")
        self.process_set_id: int | None = None

    @property
    def ranks(self) -> list[int] | None:
        """The global ranks in the set, ascending."""
        return self._ranks

    def size(self) -> int | None:
        """Number of ranks in the set; None while the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """This process's place in the set; None if it is not in it or the set is not registered."""
        if not self.included() or self.ranks is None:
            return None
        return self.ranks.index(context.mesh().rank)

    def included(self) -> bool | None:
        """Whether this process is in the set; None while the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return context.mesh().rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks. It has no state of its own: its ranks are those of the running job."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int] | None:
        return list(range(context.mesh().size)) if context.initialized else None

    def size(self) -> int | None:
        return context.mesh().size if context.initialized else None

    def rank(self) -> int | None:
        return context.mesh().rank if context.initialized else None

    def included(self) -> bool | None:
        return True if context.initialized else None


global_process_set = _GlobalProcessSet()


def set_number(process_set: ProcessSet) -> int:
    """The number that the core knows the set by. Raises ValueError if it has none, TypeError for anything else."""
    try:
        number = process_set.process_set_id
    except AttributeError:
        raise TypeError(
            f"process_set= takes a ProcessSet, got {type(process_set).__name__}."
        ) from None
    if number is None:
        raise ValueError(f"{process_set} is not registered in this job; use global_process_set.")
    return number
