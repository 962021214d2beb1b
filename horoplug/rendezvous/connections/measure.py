"""What a message and a byte cost between hosts, measured over fresh connections in a few milliseconds.

Every rank measures the way to the next one while the one before measures the way to it. All that travels are single
bytes that say what they are, so that both can go over the same connection and nobody has to keep count of messages:
pings and their echoes, a burst, and an acknowledgement of its half and of its end. The bandwidth is that of the second
half, unless that came all at once. Nothing is left in the connections once all ranks have said that they are
through."""

from __future__ import annotations

import contextlib
import selectors
import socket
import statistics
import time
from collections.abc import Iterable

_PING, _ECHO, _BURST, _ACK = b"p", b"e", b"b", b"a"
_PINGS = 16
_HALF = 256 * 1024  # bytes of half a burst

Speed = tuple[float, float]
"""Seconds that a message takes one way, and bytes per second."""


class Measurement:
    """The measurement of one rank: to the next rank, from the previous one, or both."""

    def __init__(self, to: socket.socket | None, back: socket.socket | None) -> None:
        """``to``: the connection whose speed is wanted; ``back``: the one over which the other side measures. They may
        be the same, and do not block."""
        self._to = to
        self._outbox: dict[socket.socket, bytearray] = {s: bytearray() for s in (to, back) if s}
        self._sent_at = 0.0
        self._buffer = bytearray(_HALF)
        self._burst_at = 0.0
        self._trips: list[float] = []
        self._acks: list[float] = []
        self._heard = 0  # of the other side's burst
        self._served = back is None

    def run(self, deadline: float) -> Speed | None:
        """The speed, or None if there was nothing to measure; returns when the other side is served, too.

        Errors: TimeoutError, OSError; the connections are then of no more use."""
        if self._to is not None:
            self._ping()
        with selectors.DefaultSelector() as selector:
            for sock in self._outbox:
                selector.register(sock, selectors.EVENT_READ)
            while not self._done():
                for sock, outbox in self._outbox.items():
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if outbox else 0)
                    selector.modify(sock, wanted)
                if time.monotonic() > deadline:
                    raise TimeoutError("a rank did not answer while links were measured")
                for key, events in selector.select(max(deadline - time.monotonic(), 0)):
                    assert isinstance(key.fileobj, socket.socket)
                    if events & selectors.EVENT_READ:
                        self._receive(key.fileobj)
                    self._flush(key.fileobj)
        if self._to is None:
            return None
        trip = statistics.median(self._trips[1:])  # the first one wakes everybody up
        # A fast link has both halves in the other side's buffers before it reads; a filter may let the first one pass.
        whole = self._acks[1] - self._burst_at - trip
        half = max(self._acks[1] - self._acks[0], whole / 2, 1e-6)
        return trip / 2, _HALF / half

    def _done(self) -> bool:
        measured = self._to is None or len(self._acks) == 2
        return measured and self._served and not any(self._outbox.values())

    def _ping(self) -> None:
        assert self._to is not None
        self._sent_at = time.perf_counter()
        self._send(self._to, _PING)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        self._outbox[sock] += data
        self._flush(sock)

    def _flush(self, sock: socket.socket) -> None:
        outbox = self._outbox[sock]
        sent = 0
        with contextlib.suppress(BlockingIOError), memoryview(outbox) as waiting:
            while sent < len(waiting):
                sent += sock.send(waiting[sent:])
        del outbox[:sent]

    def _receive(self, sock: socket.socket) -> None:
        try:
            size = sock.recv_into(self._buffer)
        except BlockingIOError:
            return
        if not size:
            raise ConnectionResetError("a connection was closed while it was measured")
        now = time.perf_counter()
        # Whatever is rare is found fast; the rest is the burst.
        pings, echoes, acks = (self._buffer.count(c, 0, size) for c in (_PING, _ECHO, _ACK))
        burst = size - pings - echoes - acks
        for _ in range(echoes):
            self._trips.append(now - self._sent_at)
            if len(self._trips) < _PINGS:
                self._ping()
            elif len(self._trips) == _PINGS:
                self._burst_at = now
                self._send(sock, _BURST * 2 * _HALF)
        self._acks += [now] * acks
        answer = _ECHO * pings
        before, self._heard = self._heard, self._heard + burst
        for mark in (_HALF, 2 * _HALF):
            if before < mark <= self._heard:
                answer += _ACK
        self._served = self._served or self._heard >= 2 * _HALF
        if answer:
            self._send(sock, answer)


def agree(speeds: Iterable[Speed | None]) -> Speed | None:
    """The medians of what was measured, rounded so that a report of them is exact; None if nothing was."""
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return None
    latency, bandwidth = (statistics.median(column) for column in zip(*known, strict=True))
    return round(latency, 7), float(round(bandwidth, -4))
