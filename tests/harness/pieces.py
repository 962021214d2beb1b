"""A stream of messages between two ends of an authenticated connection that arrives in pieces."""

import random
from collections.abc import Sequence

from horoplug.rendezvous.network.messages import MessageChannel


def send_in_pieces(
    rng: random.Random,
    sender: MessageChannel,
    receiver: MessageChannel,
    payloads: Sequence[bytes],
    limit: int,
) -> tuple[bytes, list[bytes]]:
    """Send payloads, each in two parts; they arrive in pieces of 1 to 300 bytes. Returns the bytes on the way, and the
    payloads that were received with this limit. Nothing may be left over."""
    stream = b"".join(sender.seal(payload[:7], payload[7:]) for payload in payloads)
    inbox, received, begin = bytearray(), [], 0
    while begin < len(stream):
        count = rng.randint(1, 300)
        inbox += stream[begin : begin + count]
        begin += count
        while (payload := receiver.take(inbox, limit)) is not None:
            received.append(payload)
    assert not inbox
    return stream, received
