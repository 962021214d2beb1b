"""The measured speed of messages between hosts, over TCP or over MPI."""

from __future__ import annotations

from typing import NamedTuple


class LinkSpeed(NamedTuple):
    """What ranks measured for messages between hosts."""

    latency: float
    """Seconds that a small message takes one way."""
    bandwidth: float
    """Bytes per second of large messages."""

    def seconds(self, message_bytes: int) -> float:
        """Expected time of one message."""
        return self.latency + message_bytes / self.bandwidth
