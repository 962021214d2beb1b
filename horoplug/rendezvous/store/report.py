"""Rank 0 tells the launcher from time to time what it has done, for the line at the bottom of a terminal."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from horoplug.base.config import Config
from horoplug.base.errors import AuthenticationError, RendezvousError
from horoplug.rendezvous.store.client import StoreClient

KEY = "status"  # of the store
_log = logging.getLogger("horoplug")


class Counters(NamedTuple):
    """What rank 0 has done since it was initialised."""

    tensors: int
    bytes: int


def pack(stats: Mapping[str, int]) -> bytes:
    """The engine's counters as they are told."""
    return json.dumps({name: stats[name] for name in Counters._fields}).encode()


def unpack(value: bytes | None) -> Counters | None:
    """The same; None for what is none."""
    try:
        found = json.loads(value or b"null")
        return Counters(int(found["tensors"]), int(found["bytes"]))
    except (ValueError, TypeError, KeyError):
        return None


class Report:
    """A thread that sets the key every ``config.status_seconds``, over a connection of its own: this process's other
    one says by its end that the rank has left. ``stats``: gives the engine's counters."""

    def __init__(self, config: Config, stats: Callable[[], Mapping[str, int]]) -> None:
        self._stats = stats
        self._over = threading.Event()
        self._looking = threading.Lock()  # held while the engine is asked
        self._thread = threading.Thread(
            target=self._run, args=(config,), name="horoplug-status", daemon=True
        )
        self._thread.start()

    def _run(self, config: Config) -> None:
        address, port, secret = config.rendezvous_addr, config.rendezvous_port, config.secret_key
        if address is None or port is None or secret is None:
            return
        while not self._over.wait(config.status_seconds):
            try:
                with StoreClient.connect(address, port, secret, config.start_timeout) as client:
                    self._tell(client, config.status_seconds)
            except AuthenticationError as error:
                _log.debug("the launcher is told nothing: %s", error)
                return
            except (OSError, RendezvousError) as error:
                _log.debug("the launcher is told nothing for now: %s", error)  # it was suspended

    def _tell(self, client: StoreClient, seconds: float) -> None:
        while True:
            with self._looking:
                if self._over.is_set():
                    return
                value = pack(self._stats())
            client.set(KEY, value)
            if self._over.wait(seconds):
                return

    def close(self) -> None:
        """Say no more. The engine is not asked after this; a message that is under way is not waited for long."""
        with self._looking:
            self._over.set()
        self._thread.join(1.0)
