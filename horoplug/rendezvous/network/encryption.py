"""Encryption of a connection between hosts: derives the keys of both ends, and encrypts the messages of Python.

Each end makes a fresh X25519 key for each connection, and sends its public key in place of the handshake's nonce
(auth.py), so that the proofs by the job's secret cover both. The keys of the connection follow by HKDF-SHA256
(RFC 5869) from the job's secret as salt, the shared secret of the key exchange, and both public keys. An attacker who
records the traffic and learns the job's secret later cannot compute them (forward secrecy): both ends delete their
private keys after the handshake."""

from __future__ import annotations

import hashlib
import hmac

from horoplug.base.errors import AuthenticationError, TamperedMessageError
from horoplug.rendezvous.network.libcrypto import TAG_BYTES, Cipher, PrivateKey, libcrypto
from horoplug.rendezvous.network.messages import OVERHEAD, Buffer, MessageChannel


def fresh_key() -> PrivateKey:
    """A key for one connection. Errors: ValueError with a one-line message if libcrypto cannot be used."""
    return PrivateKey(libcrypto())


class SessionKeys:
    """Derives the keys of one connection, once both ends have proved that they know the job's secret."""

    def __init__(
        self, secret: bytes, own: PrivateKey, other: bytes, transcript: bytes, peer: str
    ) -> None:
        """``own``: the key of this end; ``other``: the public key of the other end; ``transcript``: the data of the
        handshake that both ends have; ``peer``: names the other end in messages. Errors: AuthenticationError for an
        invalid public key."""
        try:
            shared = own.exchange(other)
        except ValueError as error:
            raise AuthenticationError(f"{peer} sent {error}") from None
        self._key = hmac.new(secret, shared + transcript, hashlib.sha256).digest()

    def derive(self, label: bytes) -> bytes:
        """A key of 32 bytes. Different labels give independent keys."""
        return hmac.new(self._key, label + b"\1", hashlib.sha256).digest()


class EncryptedChannel(MessageChannel):
    """A channel whose payloads are encrypted by AES-256-GCM; the tags of the framing cover the ciphertext. The nonce is
    the message's number, and each direction has a key of its own."""

    overhead = OVERHEAD + TAG_BYTES

    def __init__(
        self, sending: bytes, receiving: bytes, peer: str, ciphers: tuple[bytes, bytes]
    ) -> None:
        """``ciphers``: the encryption keys for sending and for receiving; the other arguments are those of
        :class:`MessageChannel`."""
        super().__init__(sending, receiving, peer)
        self._sealing, self._opening = (Cipher(libcrypto(), key) for key in ciphers)

    def seal(self, *parts: Buffer) -> bytes:
        """See :meth:`MessageChannel.seal`."""
        return super().seal(self._sealing.seal(self._sent, b"".join(parts)))

    def missing(self, inbox: bytearray, limit: int) -> int:
        """See :meth:`MessageChannel.missing`."""
        return super().missing(inbox, limit + TAG_BYTES)

    def take(self, inbox: bytearray, limit: int) -> bytes | None:
        """See :meth:`MessageChannel.take`."""
        number = self._received
        sealed = super().take(inbox, limit)
        if sealed is None:
            return None
        payload = self._opening.open(number, sealed)
        if payload is None:
            raise TamperedMessageError(f"a message of {self._peer} was encrypted with another key")
        return payload
