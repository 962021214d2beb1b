"""The launcher's messages to a membership that should stop (horoplug/rendezvous/elastic/stop_point.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from horoplug.rendezvous.elastic.messages import (
    Checks,
    HostUpdate,
    pack_update,
    stop_key,
    update_key,
)
from horoplug.rendezvous.elastic.stop_point import Announce, Decide, StopVote
from horoplug.rendezvous.store.server import StoreServer


class Update:
    """Tells the members of a membership that processes should come or go, and has them agree where they stop."""

    def __init__(
        self, server: StoreServer, generation: int, update: HostUpdate, vote: StopVote
    ) -> None:
        self._server = server
        self._generation = generation
        self._value = pack_update(update)
        self._vote = vote

    @property
    def due(self) -> float | None:
        """When :meth:`advance` has to be called."""
        return self._vote.due

    def count(self, message: Checks) -> None:
        """A process has made so many checks."""
        if message.generation == self._generation:
            self._vote.count(message.process, message.round, message.checks)

    def advance(self) -> None:
        """Tell the members what they wait for."""
        self._tell(self._vote.advance(time.monotonic()))

    def end(self) -> None:
        """A member has ended, or the membership is over."""
        self._tell(self._vote.end())

    @property
    def unused_round(self) -> int:
        """The first round that the members have not been told of."""
        return self._vote.unused_round

    def _tell(self, actions: Iterator[Announce | Decide]) -> None:
        for action in actions:
            match action:
                case Announce(round_number):
                    self._server.set(update_key(self._generation, round_number), self._value)
                case Decide(round_number, stop):
                    value = json.dumps(stop).encode()
                    self._server.set(stop_key(self._generation, round_number), value)
