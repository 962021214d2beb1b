"""Process sets: the ranks that an operation runs on. The global set has all ranks; the program may add others.

Operations of different sets run independently of each other."""

import json
import operator
from collections.abc import Iterable, Sequence
from typing import Any, cast

from horoplug._native import Error
from horoplug.common.byte_transfer import allgather_bytes
from horoplug.common.context import context
from horoplug.common.opspec import Call
from horoplug.common.status import await_value, exception
from horoplug.rendezvous.bootstrap.over_mpi import ranks_of_communicator


class ProcessSet:
    """A subset of the ranks, for the ``process_set`` argument of operations.

    ``process_set_id`` is the id of the set in the job. It is None before ``init(process_sets=[...])`` or
    :func:`add_process_set`, and after :func:`remove_process_set` or ``shutdown``.

    ``ranks``: global ranks in any order, or a communicator of mpi4py, whose ranks are known once the set is registered.
    Every rank passes the communicator that ``Split`` has returned to it, which may be COMM_NULL. Raises ValueError for
    anything else.

    Example, on two ranks:

        first = hvd.add_process_set(hvd.ProcessSet([0]))
        first.ranks, first.size()  # -> ([0], 1)
        first.included()  # -> True on rank 0, False on rank 1
        first.rank()  # -> 0 on rank 0, None on rank 1
        hvd.remove_process_set(first)  # -> True
    """

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
            text = " ".join(repr(ranks).split())
            raise ValueError(f"ProcessSet takes the ranks as integers, got {text}") from None

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
        """Rank of this process in the set; None if it is not in it or the set is not registered."""
        if not self.included() or self.ranks is None:
            return None
        return self.ranks.index(context.connections().rank)

    def included(self) -> bool | None:
        """Whether this process is in the set; None while the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return context.connections().rank in self.ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessSet":
        """Returns itself: a copy of a layer uses the same set."""
        return self

    def _invalidate(self) -> None:
        self.process_set_id = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of the running job. It has no state of its own."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int] | None:
        return list(range(context.connections().size)) if context.initialized else None

    def size(self) -> int | None:
        return context.connections().size if context.initialized else None

    def rank(self) -> int | None:
        return context.connections().rank if context.initialized else None

    def included(self) -> bool | None:
        return True if context.initialized else None


global_process_set = _GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Sequence[int] | Any) -> ProcessSet:
    """Register a process set and return it. Collective: every rank of the job calls this in the same order, including
    ranks that are not in the set. ``process_set``: a ProcessSet or a list of global ranks. With a communicator of
    mpi4py, or a ProcessSet made from one, every rank passes its own communicator, and the sets of all these
    communicators are registered.

    ``hvd.elastic.run`` registers the sets again when it forms the job again. The first call for such a set then only
    returns it, and need not be made by all ranks. A set that is left out meanwhile, because not all of its ranks exist,
    has the id None.

    Raises NotInitializedError before ``init``, ValueError if a set of these ranks exists already (such as the global
    set) or a rank does not exist, and HorovodInternalError if the ranks pass different sets.

    Example, on two ranks:

        last = hvd.add_process_set([1])
        if last.included():
            hvd.barrier(process_set=last)
        hvd.add_process_set([1])  # raises ValueError
        hvd.remove_process_set(last)  # -> True
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    context.engine()  # before init, there is no set to claim
    for each in _sets_of_all_ranks(process_set):
        if not context.added_sets.claim(each):
            _add(each)
            context.added_sets.add(each)
    return process_set


def register(process_set: ProcessSet) -> None:
    """Register a process set for the current job only; otherwise as :func:`add_process_set`."""
    for each in _sets_of_all_ranks(process_set):
        _add(each)


def _sets_of_all_ranks(process_set: ProcessSet) -> list[ProcessSet]:
    """The sets to register when each rank passes such a set: this one, or those of the communicators of all ranks."""
    if process_set.mpi_comm is None:
        return [process_set]
    own = process_set._ranks = _ranks_in_job(process_set.mpi_comm)
    lists = sorted({tuple(ranks) for ranks in _rank_lists(own)} - {()})
    return [process_set if list(ranks) == own else ProcessSet(ranks) for ranks in lists]


def _ranks_in_job(communicator: Any) -> list[int]:
    """The ranks of a communicator by their numbers in this job."""
    if not communicator:  # MPI.COMM_NULL
        return []
    job = context.ranks or range(context.connections().size)
    members = ranks_of_communicator(communicator) or range(communicator.Get_size())
    try:
        return sorted(job.index(rank) for rank in members)
    except ValueError:
        raise ValueError(
            f"the communicator has processes {list(members)}, of which not all are in this job of {list(job)}"
        ) from None


def _rank_lists(own: list[int]) -> list[list[int]]:
    """Allgather of one list of ranks from every rank."""
    return [each for each in _from_all_ranks(own) if each]


def _from_all_ranks(own: Any) -> list[Any]:
    """Allgather of something that JSON can express, without the ranks that have called ``join``."""
    parts = allgather_bytes(bytearray(json.dumps(own).encode()), Call("horoplug.process_sets"))
    return [json.loads(bytes(part)) for part in parts if part]


def _add(process_set: ProcessSet) -> None:
    engine = context.engine()
    ranks = process_set.ranks
    assert ranks is not None
    number = _number_of(ranks)
    if number is not None:
        raise ValueError(f"process set {number} already has the ranks {ranks}")
    try:
        process_set.process_set_id = await_value(engine, engine.add_process_set(ranks))
    except Error as error:
        raise exception(error) from None
    context.process_sets[process_set.process_set_id] = process_set


def _number_of(ranks: list[int]) -> int | None:
    """The id of the registered set of these ranks."""
    sets = {0: global_process_set, **context.process_sets}
    return next((number for number, known in sets.items() if known.ranks == ranks), None)


def restore_added_sets() -> None:
    """Register again what the program had added before the job was formed again, also on the ranks of new processes.
    Sets of all ranks stand for the global set, and sets with ranks that do not exist now are left out. Collective.

    Raises HorovodInternalError if a rank fails meanwhile."""
    added = context.added_sets
    lists = _from_all_ranks(None if added.is_newcomer else list(added))
    added.agree([None if each is None else [tuple(ranks) for ranks in each] for each in lists])
    for ranks in added:
        process_set = cast(ProcessSet | None, added.first_object(ranks)) or ProcessSet(ranks)
        number = _number_of(list(ranks))
        if number is not None:
            process_set.process_set_id = number
        elif ranks[-1] < context.connections().size:
            _add(process_set)
        added.restore(ranks, process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; its operations that are not complete fail. Collective: every rank of the job calls this, in
    the same order.

    ``process_set``: what :func:`add_process_set` has returned. Returns True if it was removed. Returns False, and does
    nothing, for the global set and for a set that was not added. Raises NotInitializedError before ``init``, and
    HorovodInternalError if the ranks remove different sets.

    Example, on two ranks:

        last = hvd.add_process_set([1])
        hvd.remove_process_set(last)  # -> True
        hvd.remove_process_set(last)  # -> False
    """
    engine = context.engine()
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"remove_process_set takes a ProcessSet, got {type(process_set).__name__}; pass what add_process_set has "
            "returned"
        )
    number = process_set.process_set_id
    if not number:  # of an added set after a reset: left out, or the global set stands for it
        return context.added_sets.drop(process_set)
    try:
        await_value(engine, engine.remove_process_set(number))
    except Error as error:
        raise exception(error) from None
    # The caller's object may differ from the registered one.
    for known in (context.process_sets.pop(number, process_set), process_set):
        context.added_sets.remove(known.ranks or ())
        known._invalidate()
    return True


def process_set_by_id(number: int) -> ProcessSet:
    """The registered set with this id."""
    return cast(ProcessSet, context.process_sets[number]) if number else global_process_set


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of all registered sets by id. (The name is Horovod's.)"""
    sets = {0: global_process_set, **context.process_sets}
    return {number: list(known.ranks or ()) for number, known in sets.items()}


def process_set_id(process_set: ProcessSet) -> int:
    """The id of a set. Raises ValueError if it is not registered, TypeError for anything but a ProcessSet."""
    try:
        number = process_set.process_set_id
    except AttributeError:
        raise TypeError(
            f"process_set= takes a ProcessSet, got {type(process_set).__name__}"
        ) from None
    if number is None:
        raise ValueError(
            f"{process_set} is not registered in this job; use add_process_set, on every rank"
        )
    if number and number not in context.process_sets:
        raise ValueError(f"{process_set} has the id {number}, which no process set of this job has")
    return number
