"""A man in the middle, who reads or changes what the two ends of a connection send each other."""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from horoplug.rendezvous.connections import connector
from tests.harness.limits import scaled

Forward = Callable[[str, socket.socket, socket.socket], object]
"""Passes on what ``source`` sends to ``sink`` until its end. Called with the direction ("up": from the client), source
and sink, by one thread for each direction of each connection."""


class Relay:
    """Listens, and connects every client with ``target``. A context manager; in a rank it may live until the end."""

    def __init__(self, target: Any, forward: Forward) -> None:
        self.forward = forward
        self._target = target
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(scaled(20))
            assert not thread.is_alive()
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for ends in (("up", client, server), ("down", server, client)):
                    thread = threading.Thread(target=self._run, args=ends, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _run(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self.forward(direction, source, sink)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def init_behind_relay(init: Callable[[], object], forward: Forward) -> None:
    """Initialise a rank. Rank 1 connects to rank 0 through a relay, which is ``sys.horoplug_relay`` there."""
    original = connector.Connector.connect_to

    def connect_to(self: Any, addresses: Any, local: Any, streams: int) -> Any:
        if self._me.rank == 1:
            relay = sys.horoplug_relay = Relay(addresses[0], forward)  # type: ignore[attr-defined]
            addresses = addresses | {0: relay.address}
        return original(self, addresses, local, streams)

    connector.Connector.connect_to = connect_to  # type: ignore[method-assign]
    try:
        init()
    finally:
        connector.Connector.connect_to = original  # type: ignore[method-assign]
