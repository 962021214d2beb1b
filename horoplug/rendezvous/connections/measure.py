"""Measures latency and bandwidth of TCP connections between hosts, over fresh connections, in a few milliseconds.

Every rank measures the link to the next rank while the previous rank measures the link to it. Every byte is a message
of its own whose value is its kind, so that both measurements can share one connection: pings and their echoes, a burst,
and acknowledgements of the first half and of the end of the burst. The bandwidth is that of the second half, unless the
second half arrived at once. When :meth:`Measurement.run` has returned on all ranks, the connections are empty. If a
rank has ended, its neighbours go on with their other neighbours, so that every other connection can still be used."""

from __future__ import annotations

import contextlib
import selectors
import socket
import statistics
import time
from collections.abc import Iterable, Sequence

from horoplug.base.link_speed import LinkSpeed

_PING, _ECHO, _BURST, _ACK = b"p", b"e", b"b", b"a"
_PINGS = 16
_HALF_BYTES = 256 * 1024  # half a burst


class Measurement:
    """One rank's part: it measures the link to the next rank, answers the previous one, or both."""

    def __init__(self, to: socket.socket | None, back: socket.socket | None) -> None:
        """``to``: the connection to measure; ``back``: the connection over which the peer measures. They may be the
        same, and are nonblocking."""
        self._to, self._back = to, back
        self._outbox: dict[socket.socket, bytearray] = {s: bytearray() for s in (to, back) if s}
        self._sent_at = 0.0
        self._buffer = bytearray(_HALF_BYTES)
        self._burst_at = 0.0
        self._trips: list[float] = []
        self._acks: list[float] = []
        self._received = 0  # bytes of the peer's burst

    def run(self, deadline: float) -> LinkSpeed | None:
        """Measure, and answer the peer's measurement. Returns the speed of ``to``; None without ``to``, and if the next
        rank has ended.

        Errors: TimeoutError after ``deadline`` (``time.monotonic()``); the connections are then unusable."""
        if self._to is not None:
            self._outbox[self._to] += _PING
            self._sent_at = time.perf_counter()
        with selectors.DefaultSelector() as selector:
            for sock in self._outbox:
                selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while not self._done():
                for sock, outbox in self._outbox.items():
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if outbox else 0)
                    selector.modify(sock, wanted)
                if time.monotonic() > deadline:
                    raise TimeoutError("a rank did not answer while links were measured")
                for key, events in selector.select(max(deadline - time.monotonic(), 0)):
                    assert isinstance(key.fileobj, socket.socket)
                    try:
                        if events & selectors.EVENT_READ:
                            self._receive(key.fileobj)
                        self._flush(key.fileobj)
                    except OSError:  # the store or the core reports the end of this peer
                        selector.unregister(key.fileobj)
                        self._leave_out(key.fileobj)
        if self._to is None:
            return None
        trip = statistics.median(self._trips[1:])  # the first one includes waking up
        # On a fast link both halves are in the peer's buffers before it reads. A traffic shaper may let the first half
        # pass unlimited.
        whole = self._acks[1] - self._burst_at - trip
        half = max(self._acks[1] - self._acks[0], whole / 2, 1e-6)
        return LinkSpeed(trip / 2, _HALF_BYTES / half)

    def _done(self) -> bool:
        measured = self._to is None or len(self._acks) == 2
        served = self._back is None or self._received >= 2 * _HALF_BYTES
        return measured and served and not any(self._outbox.values())

    def _leave_out(self, sock: socket.socket) -> None:
        del self._outbox[sock]
        if self._to is sock:
            self._to = None
        if self._back is sock:
            self._back = None

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
        # Counting the rare bytes is fast; the rest belongs to the burst.
        pings, echoes, acks = (self._buffer.count(c, 0, size) for c in (_PING, _ECHO, _ACK))
        burst = size - pings - echoes - acks
        for _ in range(echoes):
            self._trips.append(now - self._sent_at)
            if len(self._trips) < _PINGS:
                self._ping()
            elif len(self._trips) == _PINGS:
                self._burst_at = now
                self._send(sock, _BURST * 2 * _HALF_BYTES)
        self._acks += [now] * acks
        answer = _ECHO * pings
        before, self._received = self._received, self._received + burst
        for mark in (_HALF_BYTES, 2 * _HALF_BYTES):
            if before < mark <= self._received:
                answer += _ACK
        if answer:
            self._send(sock, answer)


def agree(speeds: Iterable[Sequence[float] | None]) -> LinkSpeed | None:
    """The medians of the ranks' measurements; None if no rank measured.

    ``speeds``: (latency, bandwidth), as JSON delivers them. The medians are rounded so that they survive a round trip
    through JSON exactly."""
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return None
    latency, bandwidth = (statistics.median(column) for column in zip(*known, strict=True))
    return LinkSpeed(round(latency, 7), float(round(bandwidth, -4)))
