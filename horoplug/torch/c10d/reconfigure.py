"""Groups whose members change: where the members that ``ProcessGroup.reconfigure`` names find each other.

Each process that is asked for its handle serves one of PyTorch's stores. The members of a reconfiguration use that of
their rank 0, as the members of other groups use the store of ``init_process_group``: see :mod:`.connect`."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from horoplug.base.config import Config
from horoplug.base.errors import RendezvousError
from horoplug.rendezvous.network.addresses import loopback, own_address

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def host_for_others() -> str:
    """The address at which the other ranks reach this process."""
    if os.environ.get("MASTER_ADDR") in _LOOPBACK:
        return loopback()
    return own_address(Config.from_env().gloo_iface)


STORE_ERRORS = (RuntimeError, TimeoutError)
"""What PyTorch's stores raise; TimeoutError is known from 2.1."""


class Meeting(NamedTuple):
    """The members of one reconfiguration."""

    uuid: int
    host: str
    port: int
    rank: int
    size: int

    def store(self, timeout: timedelta) -> Any:
        """A connection to the store of rank 0, for this reconfiguration alone. Raises RendezvousError if it does not
        answer within ``timeout``."""
        try:
            store = dist.TCPStore(
                self.host, self.port, None, False, timeout, wait_for_workers=False
            )
        except STORE_ERRORS as error:
            reason = str(error).partition("\n")[0]
            raise RendezvousError(
                f"the store of rank 0 of the reconfigured process group does not answer: {reason}"
            ) from None
        return dist.PrefixStore(f"reconfigure/{self.uuid}", store)


class Place:
    """Where the others find this process. Its store exists from the first call of :meth:`handle` on."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(16)
        self._store: Any = None
        self._handle = ""

    def handle(self) -> str:
        """The same text in each call."""
        if not self._handle:
            host = host_for_others()
            self._store = dist.TCPStore(host, 0, None, True, wait_for_workers=False)
            self._handle = json.dumps({"id": self._id, "host": host, "port": self._store.port})
        return self._handle

    def find(self, uuid: int, handles: Collection[str]) -> Meeting:
        """The members that have ``handles``. Raises ValueError unless this process is one of them, once."""
        ordered = list(handles) if isinstance(handles, (list, tuple)) else sorted(handles)
        try:
            found = [json.loads(handle) for handle in ordered]
            ids = [each["id"] for each in found]
            host, port = str(found[0]["host"]), int(found[0]["port"])
        except (ValueError, TypeError, KeyError, IndexError):
            raise ValueError(
                "reconfigure() takes what get_reconfigure_handle() has returned on each member of the group"
            ) from None
        if len(set(ids)) != len(ids) or self._id not in ids:
            raise ValueError(
                "reconfigure() takes one handle for each member, among them that of this process"
            )
        return Meeting(uuid, host, port, ids.index(self._id), len(ids))


class NotConnected:
    """Stands for the engine of a group that has no ranks."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "the process group has no ranks: call reconfigure() on each of them before its first operation"
        )
