"""The other backends of a process group, as in ``init_process_group("cpu:horoplug,cuda:nccl")``.

PyTorch replaces a group by the first one that is a Python class, before it creates the backends of the other devices.
This one therefore creates them itself, when a tensor on such a device is used for the first time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


class Delegates:
    """Creates and keeps the backends for devices that horoplug was not chosen for."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, own_names: tuple[str, ...]
    ) -> None:
        """``own_names``: the names of backends that mean the group itself."""
        self._arguments = store, rank, size, timeout
        self._own_names = own_names
        self._made: dict[str, Any] = {}
        self._config: dict[str, str] | None = None
        self.for_cpu = False
        """Whether another backend was chosen for tensors in host memory."""

    def configure(self, config: str) -> None:
        """``config``: ``device:backend`` pairs, separated by commas."""
        pairs = [pair.partition(":") for pair in config.split(",")]
        self._config = {device: backend.lower() for device, _, backend in pairs if backend}
        self.for_cpu = self._config.get("cpu", self._own_names[0]) not in self._own_names

    def find(self, group: Any, device: str) -> Any:
        """The backend for a type of device; None: horoplug."""
        if self._config is None:
            self.configure(str(distributed_c10d._world.pg_backend_config.get(group, "")))
        assert self._config is not None
        backend = self._config.get(device, self._own_names[0])
        if backend in self._own_names:
            return None
        if device not in self._made:
            self._made[device] = self._make(backend, device)
        return self._made[device]

    def _make(self, backend: str, device: str) -> Any:
        store, rank, size, timeout = self._arguments
        scoped = distributed_c10d.PrefixStore(f"{device}/", store)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(scoped, rank, size, options)
        if backend == "gloo":
            return dist.ProcessGroupGloo(scoped, rank, size, timeout=timeout)
        raise ValueError(
            f'init_process_group("…{device}:{backend}…"): beside horoplug, only gloo and nccl can be chosen for the '
            "tensors of another device"
        )

    def set_timeout(self, timeout: timedelta) -> None:
        store, rank, size, _ = self._arguments
        self._arguments = store, rank, size, timeout
        for backend in self._made.values():
            backend._set_default_timeout(timeout)

    def shutdown(self) -> None:
        for backend in self._made.values():
            backend.shutdown()
        self._made.clear()
