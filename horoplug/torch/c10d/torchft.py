"""Process groups for torchft, in place of its ``ProcessGroupGloo`` and ``ProcessGroupBabyGloo``::

    from horoplug.torch.c10d.torchft import ProcessGroupHoroplug

    manager = torchft.Manager(pg=ProcessGroupHoroplug(timeout=timedelta(seconds=10)), ...)

torchft's own groups for Gloo take PyTorch's backends only, which Python classes can be since PyTorch 2.14. There,
HOROPLUG_AS_GLOO=1 also works with torchft."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from horoplug.torch.c10d.process_group import ProcessGroup

try:
    from torchft.process_group import ProcessGroupBaby, ProcessGroupWrapper
except ModuleNotFoundError as error:
    if error.name != "torchft":
        raise
    raise ImportError(
        "horoplug.torch.c10d.torchft needs torchft: pip install torchft-nightly"
    ) from None

_Base: Any = ProcessGroupWrapper
_BabyBase: Any = ProcessGroupBaby


class ProcessGroupHoroplug(_Base):  # type: ignore[misc]
    """A process group of torchft whose operations run on horoplug. It takes the arguments of torchft's other groups."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
        return ProcessGroup(store, rank, world_size, self._timeout)

    def shutdown(self) -> None:
        group: Any = getattr(self, "_pg", None)
        self._pg = None
        if group is not None:
            group.shutdown()

    def getBackendName(self) -> str:
        return "torchft-horoplug"


class ProcessGroupBabyHoroplug(_BabyBase):  # type: ignore[misc]
    """A process group of torchft whose operations run on horoplug in a child process, for tensors in host memory.

    It takes the arguments of torchft's ``ProcessGroupBabyGloo``. ``timeout``, a timedelta or seconds, limits the start
    of the child and each wait for it. A child that ends makes ``wait`` of the next operation fail at once, on the
    ranks of other children with a DistBackendError that names the rank. ``reconfigure`` starts another child."""

    @classmethod
    def _create_pg(cls, store: Any, rank: int, world_size: int) -> ProcessGroup:
        # torchft does not tell the child the time limit. The parent applies it, and ends a child that exceeds it.
        return _GroupOfChild(store, rank, world_size, dist.default_pg_timeout)

    def getBackendName(self) -> str:
        return "torchft-baby-horoplug"


class _GroupOfChild(ProcessGroup):
    has_direct_calls = False

    def _is_blocking(self, opts: Any) -> bool:
        # The child keeps a Work of each operation, and must be free to receive the next one.
        return False
