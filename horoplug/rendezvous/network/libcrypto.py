"""OpenSSL's libcrypto, which is loaded when a job asks for encryption: X25519, AES-256-GCM, and the addresses of the
functions that the core calls.

Nothing is compiled or linked against the library. Its functions are called through ctypes, because Python's own ``ssl``
module has neither a key exchange nor a cipher for single messages. A copy that the process has loaded already is
preferred."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from horoplug.base import config

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
MOST_BYTES: Final = 2**31 - 1  # limit for a message: the library's lengths are C ints

_NAMES: Final = ("libcrypto.so.3", "libcrypto.so.1.1")
_OLDEST: Final = 0x10101000  # 1.1.1, the first with X25519 keys as bytes
_X25519: Final = 1034  # NID_X25519
_GET_TAG, _SET_TAG = 0x10, 0x11  # commands of EVP_CIPHER_CTX_ctrl

_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_INT_RESULT = ctypes.POINTER(ctypes.c_int)
_SIZE_RESULT = ctypes.POINTER(ctypes.c_size_t)
# The functions that this module calls: types of the result and the parameters.
_CALLED: Final = {
    "OpenSSL_version_num": (ctypes.c_ulong,),
    "EVP_PKEY_CTX_new_id": (_POINTER, _INT, _POINTER),
    "EVP_PKEY_CTX_new": (_POINTER, _POINTER, _POINTER),
    "EVP_PKEY_CTX_free": (None, _POINTER),
    "EVP_PKEY_keygen_init": (_INT, _POINTER),
    "EVP_PKEY_keygen": (_INT, _POINTER, ctypes.POINTER(_POINTER)),
    "EVP_PKEY_get_raw_public_key": (_INT, _POINTER, ctypes.c_char_p, _SIZE_RESULT),
    "EVP_PKEY_new_raw_public_key": (_POINTER, _INT, _POINTER, ctypes.c_char_p, _SIZE),
    "EVP_PKEY_derive_init": (_INT, _POINTER),
    "EVP_PKEY_derive_set_peer": (_INT, _POINTER, _POINTER),
    "EVP_PKEY_derive": (_INT, _POINTER, ctypes.c_char_p, _SIZE_RESULT),
    "EVP_PKEY_free": (None, _POINTER),
    "EVP_aes_256_gcm": (_POINTER,),
    "EVP_CIPHER_CTX_new": (_POINTER,),
    "EVP_CIPHER_CTX_free": (None, _POINTER),
    "EVP_CIPHER_CTX_ctrl": (_INT, _POINTER, _INT, _INT, ctypes.c_char_p),
    "EVP_CipherInit_ex": (
        *(_INT, _POINTER, _POINTER, _POINTER, ctypes.c_char_p, ctypes.c_char_p, _INT),
    ),
    "EVP_CipherUpdate": (_INT, _POINTER, ctypes.c_char_p, _INT_RESULT, ctypes.c_char_p, _INT),
    "EVP_CipherFinal_ex": (_INT, _POINTER, ctypes.c_char_p, _INT_RESULT),
}
# Maps each field of hp_libcrypto to the function whose address the core gets.
_OF_CORE: Final = {
    "cipher_ctx_new": "EVP_CIPHER_CTX_new",
    "cipher_ctx_free": "EVP_CIPHER_CTX_free",
    "cipher_ctx_ctrl": "EVP_CIPHER_CTX_ctrl",
    "cipher_init_ex": "EVP_CipherInit_ex",
    "cipher_update": "EVP_CipherUpdate",
    "cipher_final_ex": "EVP_CipherFinal_ex",
    "aes_256_gcm": "EVP_aes_256_gcm",
    "sha256": "EVP_sha256",
    "hmac": "HMAC",
}


class Libcrypto:
    """The loaded library. ``functions`` has the functions of :data:`_CALLED` as attributes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Errors: ValueError, whose text says what the library lacks."""
        self._library = library  # keeps it loaded
        for name, (result, *parameters) in _CALLED.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise ValueError(f"it has no {name}") from None
            function.restype, function.argtypes = result, parameters
        self.functions = library
        if (version := int(library.OpenSSL_version_num())) < _OLDEST:
            raise ValueError(f"its version, {version:#x}, is older than OpenSSL 1.1.1")
        try:
            self.addresses = {
                field: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
                for field, name in _OF_CORE.items()
            }
        except AttributeError as error:
            raise ValueError(f"it has no {error}") from None
        self._check()

    def _check(self) -> None:
        """Use every function once: the library's build or the system's policy may exclude an algorithm."""
        one, other = PrivateKey(self), PrivateKey(self)
        key = one.exchange(other.public)
        if key != other.exchange(one.public):
            raise ValueError("its X25519 does not work")
        cipher = Cipher(self, key)
        if cipher.open(0, cipher.seal(0, b"text")) != b"text":
            raise ValueError("its AES-256-GCM does not work")


class PrivateKey:
    """A fresh X25519 key, for one connection."""

    def __init__(self, libcrypto: Libcrypto) -> None:
        """Errors: ValueError if the library refuses."""
        self._libcrypto = libcrypto
        call = libcrypto.functions
        context = call.EVP_PKEY_CTX_new_id(_X25519, None)
        key = ctypes.c_void_p()
        try:
            if (
                not context
                or call.EVP_PKEY_keygen_init(context) != 1
                or call.EVP_PKEY_keygen(context, ctypes.byref(key)) != 1
            ):
                raise ValueError("it makes no X25519 keys")
        finally:
            call.EVP_PKEY_CTX_free(context)
        self._key = key
        public = ctypes.create_string_buffer(KEY_BYTES)
        size = ctypes.c_size_t(KEY_BYTES)
        if call.EVP_PKEY_get_raw_public_key(key, public, ctypes.byref(size)) != 1:
            raise ValueError("it makes no X25519 keys")
        self.public = public.raw
        """32 bytes."""

    def exchange(self, public: bytes) -> bytes:
        """The shared secret of this key and another one, 32 bytes. ``public``: the public key of the other one.

        Errors: ValueError if ``public`` is not a valid public key."""
        call = self._libcrypto.functions
        shared = ctypes.create_string_buffer(KEY_BYTES)
        size = ctypes.c_size_t(KEY_BYTES)
        other = call.EVP_PKEY_new_raw_public_key(_X25519, None, public, len(public))
        context = call.EVP_PKEY_CTX_new(self._key, None)
        try:
            if (
                not other
                or not context
                or call.EVP_PKEY_derive_init(context) != 1
                or call.EVP_PKEY_derive_set_peer(context, other) != 1
                or call.EVP_PKEY_derive(context, shared, ctypes.byref(size)) != 1
                or size.value != KEY_BYTES
            ):
                raise ValueError("no valid X25519 key")
            return shared.raw
        finally:
            ctypes.memset(shared, 0, KEY_BYTES)
            call.EVP_PKEY_CTX_free(context)
            call.EVP_PKEY_free(other)

    def __del__(self) -> None:
        if key := getattr(self, "_key", None):
            self._libcrypto.functions.EVP_PKEY_free(key)


class Cipher:
    """AES-256-GCM with one key. The number of a message is the nonce, so each message must have another number."""

    def __init__(self, libcrypto: Libcrypto, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        self._libcrypto = libcrypto
        self._key = key

    def seal(self, number: int, data: bytes) -> bytes:
        """The ciphertext of ``data``, followed by a tag of TAG_BYTES."""
        tag = ctypes.create_string_buffer(TAG_BYTES)
        sealed = self._run(number, data, tag, seals=True)
        assert sealed is not None
        return sealed + tag.raw

    def open(self, number: int, sealed: bytes) -> bytes | None:
        """The data that was sealed with this key and number; None if ``sealed`` was changed or has another number."""
        if len(sealed) < TAG_BYTES:
            return None
        tag = ctypes.create_string_buffer(sealed[-TAG_BYTES:], TAG_BYTES)
        return self._run(number, sealed[:-TAG_BYTES], tag, seals=False)

    def _run(
        self, number: int, data: bytes, tag: ctypes.Array[ctypes.c_char], *, seals: bool
    ) -> bytes | None:
        if len(data) > MOST_BYTES:
            raise ValueError(f"a message of {len(data)} bytes; the limit is {MOST_BYTES}")
        call = self._libcrypto.functions
        nonce = number.to_bytes(12, "big")
        out = ctypes.create_string_buffer(max(len(data), 1))
        count = ctypes.c_int()
        context = call.EVP_CIPHER_CTX_new()
        try:
            begun = call.EVP_CipherInit_ex(
                context, call.EVP_aes_256_gcm(), None, self._key, nonce, int(seals)
            )
            if begun != 1:
                raise ValueError("it has no AES-256-GCM")
            if (
                call.EVP_CipherUpdate(context, out, ctypes.byref(count), data, len(data)) != 1
                or count.value != len(data)
                or not (seals or call.EVP_CIPHER_CTX_ctrl(context, _SET_TAG, TAG_BYTES, tag) == 1)
            ):
                raise ValueError("its AES-256-GCM does not work")
            if call.EVP_CipherFinal_ex(context, None, ctypes.byref(count)) != 1:
                return None
            if seals and call.EVP_CIPHER_CTX_ctrl(context, _GET_TAG, TAG_BYTES, tag) != 1:
                raise ValueError("its AES-256-GCM does not work")
            return out.raw[: len(data)]
        finally:
            call.EVP_CIPHER_CTX_free(context)


def libcrypto() -> Libcrypto:
    """The library of this process. Errors: ValueError with a one-line message if there is none that can be used."""
    return _find(config.value("LIBCRYPTO"))


@functools.cache
def _find(chosen: str | None) -> Libcrypto:
    problems: dict[str, None] = {}
    for name, mode in _candidates(chosen):
        try:
            library = ctypes.CDLL(name, mode)
        except OSError as error:
            if not mode & os.RTLD_NOLOAD:
                problems[" ".join(str(error).split())] = None
            continue
        try:
            return Libcrypto(library)
        except ValueError as error:
            problems[f"{name}: {error}"] = None
    raise ValueError(
        "HOROPLUG_ENCRYPT=1 needs OpenSSL's libcrypto, 1.1.1 or newer, which cannot be used here: "
        f"{'; '.join(problems)}; install it (Debian: libssl3), or set HOROPLUG_LIBCRYPTO to its file"
    )


def _candidates(chosen: str | None) -> Iterator[tuple[str, int]]:
    """Names and flags for dlopen, best first. ``chosen``: the file that the user has named."""
    if chosen:
        yield chosen, os.RTLD_NOW
        return
    for name in _NAMES:
        yield name, os.RTLD_NOW | os.RTLD_NOLOAD
    for prefix in dict.fromkeys((sys.prefix, sys.base_prefix)):
        for name in _NAMES:
            if (file := Path(prefix, "lib", name)).exists():
                yield str(file), os.RTLD_NOW
    for name in _NAMES:
        yield name, os.RTLD_NOW
