"""Sets of ranks that an operation can run on: all of them, and those that the program adds.

Operations of different sets run independently of each other."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from horoplug._native import Error
from horoplug.common.context import context
from horoplug.common.status import await_value, exception
from horoplug.rendezvous.bootstrap.over_mpi import ranks_of_communicator


class ProcessSet:
    """Ranks that operations can be confined to.

    ``process_set_id`` is the set's number in the job: None before ``init(process_sets=[...])`` or
    :func:`add_process_set` and after :func:`remove_process_set` or ``shutdown``.

    ``ranks``: global ranks in any order, or a communicator of mpi4py, in which case those are known once the set is
    registered; every rank gives the one that it is in (or COMM_NULL), as ``Split`` returns it. Raises ValueError for
    anything else."""

    mpi_comm: Any = None
    """The communicator that the set was made from."""

    def __init__(self, ranks: Iterable[int] | Any) -> None:
        self.process_set_id: int | None = None
        if hasattr(ranks, "Get_group"):
            self.mpi_comm = ranks
            self._ranks: list[int] | None = None
            return
        try:
            self._ranks = sorted(operator.index(rank) for rank in ranks)
        except TypeError:
            raise ValueError(f"ProcessSet takes the ranks as integers, got {ranks!r}.") from None

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

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessSet":
        """Itself: a copy of a layer that has it works on the same set."""
        return self

    def _invalidate(self) -> None:
        self.process_set_id = None

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


def add_process_set(process_set: ProcessSet | Sequence[int] | Any) -> ProcessSet:
    """Register a set of ranks; returns it. Every rank of the job calls this, in the same order, also those that are not
    in the set. With a communicator of mpi4py, or a ProcessSet of one, every rank gives its own, and all sets that there
    are among them are registered.

    Raises ValueError if there is a set of these ranks already (such as all of them) or a rank does not exist,
    HorovodInternalError if the ranks of the job name different ones."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.mpi_comm is None:
        return _add(process_set)
    own = process_set._ranks = _ranks_in_job(process_set.mpi_comm)
    for ranks in sorted({tuple(ranks) for ranks in _lists_of_all(own)} - {()}):
        _add(process_set if list(ranks) == own else ProcessSet(ranks))
    return process_set


def _ranks_in_job(communicator: Any) -> list[int]:
    """The ranks of a communicator as this job numbers them."""
    if not communicator:  # MPI.COMM_NULL
        return []
    job = context.ranks or range(context.mesh().size)
    members = ranks_of_communicator(communicator) or range(communicator.Get_size())
    try:
        return sorted(job.index(rank) for rank in members)
    except ValueError:
        raise ValueError(
            f"the communicator has processes {list(members)}, of which not all are in this job of {list(job)}."
        ) from None


def _lists_of_all(own: list[int]) -> list[list[int]]:
    """Every rank's list of ranks."""
    from horoplug.common.objects import allgather_object

    lists: list[list[int]] = allgather_object(own, name="horoplug.process_sets")
    return lists


def _add(process_set: ProcessSet) -> ProcessSet:
    engine = context.engine()
    ranks = process_set.ranks
    assert ranks is not None
    for number, known in {0: global_process_set, **context.process_sets}.items():
        if known.ranks == ranks:
            raise ValueError(f"process set {number} has the ranks {ranks} already.")
    try:
        process_set.process_set_id = await_value(engine, engine.add_process_set(ranks))
    except Error as error:
        raise exception(error) from None
    context.process_sets[process_set.process_set_id] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a set back; operations on it that are not complete fail. Every rank of the job calls this, in the same
    order.

    Returns whether there was something to remove: False for the set of all ranks and one that is not registered."""
    engine = context.engine()
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    try:
        await_value(engine, engine.remove_process_set(number))
    except Error as error:
        raise exception(error) from None
    # The caller's may be another object for the same set.
    for known in (context.process_sets.pop(number, process_set), process_set):
        known._invalidate()
    return True


def process_set_of(number: int) -> ProcessSet:
    """The registered set of a number."""
    return context.process_sets[number] if number else global_process_set


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of all registered sets by their numbers. (The name is Horovod's.)"""
    sets = {0: global_process_set, **context.process_sets}
    return {number: list(known.ranks or ()) for number, known in sets.items()}


def set_number(process_set: ProcessSet) -> int:
    """The number that the core knows the set by. Raises ValueError if it has none, TypeError for anything else."""
    try:
        number = process_set.process_set_id
    except AttributeError:
        raise TypeError(
            f"process_set= takes a ProcessSet, got {type(process_set).__name__}."
        ) from None
    if number is None:
        raise ValueError(
            f"{process_set} is not registered in this job; use add_process_set, on every rank."
        )
    if number and number not in context.process_sets:
        raise ValueError(
            f"{process_set} has the number {number}, which no process set of this job has."
        )
    return number
