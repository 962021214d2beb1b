"""A process group without its operations: how it begins and ends, and what ``torch.distributed`` asks it for."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from horoplug._native import Error
from horoplug.rendezvous.network.fork import close_in_children
from horoplug.torch.c10d.connect import connect
from horoplug.torch.c10d.delegates import Delegates
from horoplug.torch.c10d.work import Operations, Work

_open: weakref.WeakSet[Group] = weakref.WeakSet()
_registered_in = -1  # process id


# PyTorch's stubs describe the C++ class, whose methods take less and never return None.
_Base: Any = dist.ProcessGroup


class Group(_Base):  # type: ignore[misc]
    """The ranks of a group, their connections and their engine."""

    own_names: tuple[str, ...] = ("horoplug",)
    """The names of backends that mean this class. The last one is shown in profiles."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()
    ) -> None:
        """Connect with the other ranks of the group. Collective over the group.

        ``store``: a store for this group alone. ``ranks``: the ranks of the members in the default group; empty: this
        is the default group."""
        super().__init__(rank, size)  # the only constructor that subclasses in Python can use
        self._rank, self._size = rank, size
        self._store = store
        self._timeout = timeout
        self._ranks = list(ranks) or list(range(size))
        where = f" of the group of ranks {self._ranks}" if ranks and len(ranks) > 1 else ""
        self._who = f"rank {rank}{where}"
        self._delegates = Delegates(store, rank, size, timeout, self.own_names)
        self._coalesced: list[Work] | None = None
        self._interrupted: list[torch.Tensor] = []
        self._name_of_group = self._description = ""
        self._engine, self._connections = connect(store, rank, size, timeout)
        self._streams = [(fd, os.fstat(fd)) for fd in self._connections.streams]
        self._operations = Operations(self._engine, self._who, self)
        self._pid = os.getpid()
        close_in_children(self)
        _open.add(self)
        _shut_down_at_exit()

    # ---- what torch.distributed asks a group for -----------------------------------------------------------------

    def getBackendName(self) -> str:
        return "horoplug"

    name = getBackendName

    # A group in Python has to keep its name and description itself; C++ code asks by the camel-case methods.

    def _set_group_name(self, name: str) -> None:
        self._name_of_group = name

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

    def _get_backend(self, device: torch.device) -> Any:
        return self._delegates.find(self, torch.device(device).type) or self

    @property
    def _device_types(self) -> list[torch.device]:
        # Asynchronous checkpoints need a group for tensors in host memory.
        return [torch.device("cpu"), torch.device("cuda")]

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_sequence_number_for_group(self) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group; operations in flight fail on all ranks. Idempotent."""
        if self not in _open or self._pid != os.getpid():
            return
        _open.discard(self)
        self._engine.shutdown()
        self._connections.close()
        self._operations.close()
        self._delegates.shutdown()

    def abort(self) -> None:
        """End the group on all ranks at once."""
        if self in _open and self._pid == os.getpid():
            with contextlib.suppress(Error):
                self._engine.abort("abort() was called")
        self.shutdown()

    def forget(self) -> None:
        """See :class:`horoplug.rendezvous.network.fork.OwnsDescriptors`."""
        for fd, stat in self._streams:
            with contextlib.suppress(OSError):  # the engine has closed it
                if os.path.samestat(os.fstat(fd), stat):
                    os.close(fd)


def _shut_down_all() -> None:
    for group in list(_open):
        group.shutdown()


def _shut_down_at_exit() -> None:
    """Let the groups of this process leave in good order when it ends, so that it does not seem to have died."""
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        # Not atexit: processes of multiprocessing end without it.
        multiprocessing.util.Finalize(None, _shut_down_all, exitpriority=0)
