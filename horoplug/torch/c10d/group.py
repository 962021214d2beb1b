"""A process group without its operations: how it begins and ends, and what ``torch.distributed`` asks it for."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from horoplug._native import DirectGroup, Engine, Error
from horoplug.base.log import logger
from horoplug.rendezvous.network.fork import close_in_children
from horoplug.torch.c10d.connect import connect, limits_of
from horoplug.torch.c10d.delegates import Delegates
from horoplug.torch.c10d.operations import Operations
from horoplug.torch.c10d.reconfigure import NotConnected, Place
from horoplug.torch.c10d.work import Work
from horoplug.torch.dynamo import run_methods_eagerly

_open: weakref.WeakSet[Group] = weakref.WeakSet()
_default: weakref.ref[Group] | None = None  # of torch.distributed, if it is one of horoplug
_MOST_NAMED_RANKS = 8
_registered_in = -1  # process id


# PyTorch's stubs describe the C++ class, whose methods take less and never return None.
_Base: Any = dist.ProcessGroup


@run_methods_eagerly
class Group(_Base):  # type: ignore[misc]
    """The ranks of a group, their connections and their engine."""

    own_names: tuple[str, ...] = ("horoplug",)
    """The names of backends that mean this class. The last one is shown in profiles."""

    has_direct_calls = True
    """Whether calls may go to the core without the methods in Python."""

    def __init_subclass__(cls) -> None:
        run_methods_eagerly(cls)

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int] = (),
        *,
        enable_reconfigure: bool = False,
    ) -> None:
        """Connect with the other ranks of the group. Collective over the group.

        ``store``: a store for this group alone. ``ranks``: the ranks of the members in the default group; empty: this
        is the default group. ``enable_reconfigure``: :meth:`reconfigure` connects the group, which has no ranks before
        its first call."""
        super().__init__(rank, size)  # the only constructor that subclasses in Python can use
        self._timeout = timeout
        self._coalesced: list[Work] | None = None
        self._interrupted: list[torch.Tensor] = []
        self._name_of_group = self._description = ""
        self._place = Place()
        self._can_change = enable_reconfigure
        self._splits = 0
        self._pid = os.getpid()
        self._disconnect()
        self._set_members(store, rank, size, ranks)
        if not enable_reconfigure:
            self._connect(timeout)

    def _set_members(self, store: Any, rank: int, size: int, ranks: Sequence[int] = ()) -> None:
        self._rank, self._size = rank, size
        self._given_ranks: Sequence[int] | None = ranks
        self._store = store
        self._ranks = list(ranks) or list(range(size))
        where = f" of the group of ranks {self._ranks}" if ranks and len(ranks) > 1 else ""
        self._who = f"rank {rank}{where}"
        self._delegates = Delegates(store, rank, size, self._timeout, self.own_names)

    def _disconnect(self) -> None:
        self._engine: Engine = cast(Any, NotConnected())
        self._operations: Operations = cast(Any, NotConnected())
        self._has_short_way = False
        self._direct: DirectGroup | None = None

    def _connect(self, limit: timedelta) -> None:
        """Connect with the other members within ``limit``."""
        self._engine, self._connections, self._has_short_way = connect(
            self._store, self._rank, self._size, self._timeout, limit
        )
        self._streams = [(fd, os.fstat(fd)) for fd in self._connections.streams]
        self._operations = Operations(self._engine, self._who, self)
        self._operations.direct = DirectGroup(self._engine)
        self._allow_direct_calls()
        close_in_children(self)
        _open.add(self)
        _shut_down_at_exit()

    def _allow_direct_calls(self) -> None:
        """Let calls on tensors in host memory go to the core without Python while all of them are for it alone. To be
        called again when that may have changed."""
        is_allowed = (
            self.has_direct_calls
            and self._has_short_way
            and self._coalesced is None
            and not self._delegates.for_cpu
        )
        self._direct = self._operations.direct if is_allowed else None

    # ---- what torch.distributed asks a group for -----------------------------------------------------------------

    def getBackendName(self) -> str:
        return "horoplug"

    name = getBackendName

    # A group in Python has to keep its name and description itself; C++ code asks by the camel-case methods.

    def _set_group_name(self, name: str) -> None:
        """``torch.distributed`` names each of its groups once, when it has created it."""
        self._name_of_group = name
        self._join_search_for_deadlocks()

    def _ranks_in_default(self) -> Sequence[int] | None:
        """The ranks of the members in the default group; empty: this is the default group; None: unknown."""
        return self._given_ranks

    def _join_search_for_deadlocks(self) -> None:
        """Let the default group look for deadlocks across groups: its ranks may wait for each other in several."""
        global _default
        ranks = self._ranks_in_default()
        if ranks is None or self._can_change or self not in _open:
            return
        if not ranks:
            _default = weakref.ref(self)
            return
        default = None if _default is None else _default()
        if default is not None and default in _open:
            few = len(ranks) <= _MOST_NAMED_RANKS
            which = f"of ranks {list(ranks)}" if few else f"of {len(ranks)} ranks"
            with contextlib.suppress(Error):  # the default group has failed
                default._engine.attach(self._engine, f"{self._name_of_group} {which}", ranks)

    @property
    def group_name(self) -> str:
        return self._name_of_group

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        return self._description

    def setGroupName(self, name: str) -> None:
        self._name_of_group = name

    def getGroupName(self) -> str:
        return self._name_of_group

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def __repr__(self) -> str:
        return f"<horoplug process group: {self._who}, size {self._size}>"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # PyTorch's C++ code asks by these names.
    getRank, getSize = rank, size

    def _get_backend(self, device: torch.device) -> Any:
        return self._delegate(torch.device(device).type) or self

    def _delegate(self, device: str) -> Any:
        """The backend that the group has for a type of device; None: this one."""
        found = self._delegates.find(self, device)
        self._allow_direct_calls()
        return found

    @property
    def _device_types(self) -> list[torch.device]:
        # Asynchronous checkpoints need a group for tensors in host memory.
        return [torch.device("cpu"), torch.device("cuda")]

    # dist.split_group asks the backend of the accelerator, and then calls split_group(). If this were true, new_group()
    # with NCCL would try to split NCCL's group from this one.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_reconfigure = True

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Group | None:
        """A new group of some ranks of this one; None on ranks that are not among them. Collective over this group.

        ``timeout``: by default that of this group. ``opts`` and ``device_types`` are ignored: the new group has the
        backends of this one."""
        self._splits += 1
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name_of_group}:split:{self._splits}"
        store = dist.PrefixStore(f"{name}/{'-'.join(map(str, ranks))}", self._store)
        members = [self._ranks[rank] for rank in ranks]
        group = self._similar(
            store, list(ranks).index(self._rank), members, timeout or self._timeout
        )
        group.setGroupName(name)
        group.setGroupDesc(group_desc or f"{self._description}:split:{self._splits}")
        return group

    def _similar(self, store: Any, rank: int, ranks: Sequence[int], timeout: timedelta) -> Group:
        return type(self)(store, rank, len(ranks), timeout, ranks)

    def get_reconfigure_handle(self) -> str:
        """Names this process and its store to the other members of :meth:`reconfigure`."""
        return self._place.handle()

    def position(self, opts: Any) -> tuple[int, int]:
        """The rank and the number of ranks that :meth:`reconfigure` would give this process. Raises ValueError."""
        meeting = self._place.find(opts.uuid, opts.handles)
        return meeting.rank, meeting.size

    def reconfigure(self, opts: Any) -> Work:
        """Leave the group as it is, and connect the processes of ``opts.handles``. Returns when they are connected.

        ``opts``: has the attributes of PyTorch's ``ReconfigureOptions``: ``uuid``, another one for each call;
        ``handles`` of all members: their positions in a list are the ranks, and those of a set are sorted; ``timeout``
        for the connections, None: that of the group. Operations in flight fail. Raises ValueError for wrong handles,
        and the errors of :func:`.connect.connect`; the group then has no ranks, and may be reconfigured again."""
        limit = opts.timeout or self._timeout
        meeting = self._place.find(opts.uuid, opts.handles)
        self.shutdown()
        self._disconnect()
        self._set_members(meeting.store(limit), meeting.rank, meeting.size)
        self._connect(limit)
        return Work(self._operations, (), None, (), None)

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_sequence_number_for_group(self) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of operations, also of those in flight. To be called on all ranks."""
        self._timeout = timeout
        self._delegates.set_timeout(timeout)
        if self in _open:
            limits = limits_of(timeout)
            self._engine.set_limits(
                data_timeout=limits.transfer, operation_timeout=limits.operation
            )

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group; operations in flight fail on all ranks. Idempotent."""
        if self not in _open or self._pid != os.getpid():
            return
        _open.discard(self)
        with contextlib.ExitStack() as stack:  # all of it, also if a part fails
            stack.callback(self._delegates.shutdown)
            stack.callback(self._operations.close)
            stack.callback(self._connections.close)
            self._engine.shutdown()

    def __del__(self) -> None:
        # destroy_process_group() of PyTorch 2.1 only drops the group. A Work may keep the engine for longer.
        if _open is not None:  # it is None while the interpreter ends
            self.shutdown()

    def abort(self) -> None:
        """End the group on all ranks at once."""
        if self in _open and self._pid == os.getpid():
            self._operations.abort("abort() was called")
        self.shutdown()

    def forget(self) -> None:
        """See :class:`horoplug.rendezvous.network.fork.OwnsDescriptors`."""
        for fd, stat in self._streams:
            with contextlib.suppress(OSError):  # the engine has closed it
                if os.path.samestat(os.fstat(fd), stat):
                    os.close(fd)


def _shut_down_all() -> None:
    for group in list(_open):
        try:
            group.shutdown()
        except Exception:  # the others still have to leave
            logger.exception("a process group did not leave in good order")


def _shut_down_at_exit() -> None:
    """Let the groups of this process leave in good order when it ends, so that it does not seem to have died."""
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        # Not atexit: processes of multiprocessing end without it.
        multiprocessing.util.Finalize(None, _shut_down_all, exitpriority=0)
