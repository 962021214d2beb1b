"""A process group for torchft, in place of its ``ProcessGroupGloo``::

    from horoplug.torch.c10d.torchft import ProcessGroupHoroplug

    manager = torchft.Manager(pg=ProcessGroupHoroplug(timeout=timedelta(seconds=10)), ...)

torchft's own group for Gloo takes PyTorch's backends only, which Python classes can be since PyTorch 2.14. There,
HOROPLUG_AS_GLOO=1 also works with torchft."""

from __future__ import annotations

from typing import Any

from horoplug.torch.c10d.process_group import ProcessGroup

try:
    from torchft.process_group import ProcessGroupWrapper
except ModuleNotFoundError as error:
    if error.name != "torchft":
        raise
    raise ImportError(
        "horoplug.torch.c10d.torchft needs torchft: pip install torchft-nightly"
    ) from None

_Base: Any = ProcessGroupWrapper


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
