"""Keeps forked children (data loaders, say) from holding this package's sockets open.

A child that inherits a rank's connection would hide that rank's death from everyone: the connection lives as long as
its last copy. Objects registered here are told to close their descriptors in every child that is forked."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgets(Protocol):
    """Something that owns descriptors."""

    def forget(self) -> None:
        """Close the descriptors of this process only: nothing is sent, no lock is taken."""


_registered: weakref.WeakSet[Forgets] = weakref.WeakSet()


def close_in_children(thing: Forgets) -> None:
    """``thing.forget()`` is called in every forked child, as long as ``thing`` lives."""
    _registered.add(thing)


def _in_child() -> None:
    for thing in list(_registered):
        thing.forget()


os.register_at_fork(after_in_child=_in_child)
