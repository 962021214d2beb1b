"""Rank 0 reports its counters to the launcher periodically, for the status line at the bottom of a terminal."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from horoplug.base.config import Config
from horoplug.base.errors import AuthenticationError
from horoplug.rendezvous.store.client import StoreClient

KEY = "status"  # the store's key with the last report
_log = logging.getLogger("horoplug")


class Counters(NamedTuple):
    """Totals of rank 0 since ``init()``."""

    tensors: int
    bytes: int


def pack(stats: Mapping[str, int]) -> bytes:
    """Serialise the engine's counters."""
    return json.dumps({name: stats[name] for name in Counters._fields}).encode()


def unpack(value: bytes | None) -> Counters | None:
    """Deserialise counters; None if ``value`` is missing or malformed."""
    try:
        found = json.loads(value or b"null")
        return Counters(int(found["tensors"]), int(found["bytes"]))
    except (ValueError, TypeError, KeyError):
        return None


class Report:
    """A thread that sets the key :data:`KEY` every ``config.status_seconds``.

    It has a connection of its own, since the end of the rank's main connection means that the rank has left."""

    def __init__(self, config: Config, stats: Callable[[], Mapping[str, int]]) -> None:
        """``stats``: returns the engine's counters."""
        self._stats = stats
        self._closed = threading.Event()
        self._reading = threading.Lock()  # held while the engine's counters are read
        self._thread = threading.Thread(
            target=self._run, args=(config,), name="horoplug-status", daemon=True
        )
        self._thread.start()

    def _run(self, config: Config) -> None:
        address, port, secret = config.rendezvous_addr, config.rendezvous_port, config.secret_key
        if address is None or port is None or secret is None:
            return
        while not self._closed.wait(config.status_seconds):
            try:
                with StoreClient.connect(
                    address, port, secret, config.start_timeout, encrypt=config.encrypt
                ) as client:
                    self._report(client, config.status_seconds)
            except AuthenticationError as error:
                _log.debug("no status is reported to the launcher: %s", error)
                return
            except Exception as error:  # the launcher is suspended, for example
                _log.debug("no status is reported to the launcher for now: %s", error)

    def _report(self, client: StoreClient, seconds: float) -> None:
        while True:
            with self._reading:
                if self._closed.is_set():
                    return
                value = pack(self._stats())
            client.set(KEY, value)
            if self._closed.wait(seconds):
                return

    def close(self) -> None:
        """Stop reporting. The engine is not used after this returns; a message in progress is waited for up to 1 s."""
        with self._reading:
            self._closed.set()
        self._thread.join(1.0)
