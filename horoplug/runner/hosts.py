"""The hosts of a job, as users write them."""

from __future__ import annotations

from typing import NamedTuple


class Host(NamedTuple):
    """A machine and how many processes it has room for."""

    name: str
    slots: int
