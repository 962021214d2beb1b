"""Keeps forked children, such as data loader workers, from holding this package's sockets open.

A connection lives until its last copy is closed. A child that inherited a rank's connections would therefore hide the
rank's death from its peers. Objects registered here close their descriptors in every forked child."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class OwnsDescriptors(Protocol):
    """An object that owns file descriptors."""

    def forget(self) -> None:
        """Close this process's copies of the descriptors. Sends nothing and takes no lock."""


_registered: weakref.WeakSet[OwnsDescriptors] = weakref.WeakSet()


def close_in_children(owner: OwnsDescriptors) -> None:
    """Call ``owner.forget()`` in every forked child for as long as ``owner`` lives."""
    _registered.add(owner)


def _in_child() -> None:
    for owner in list(_registered):
        owner.forget()


os.register_at_fork(after_in_child=_in_child)
