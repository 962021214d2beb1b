"""What Lightning asks about the processes of a job, answered by horoplug."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment

import horoplug.torch as hvd


class HorovodEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """The processes of ``horovodrun`` or of another launcher that ``hvd.init`` knows. Joins the job when it is created.

    Raises the exceptions of ``hvd.init``.

    Example, on two ranks:

        from horoplug.lightning import HorovodEnvironment

        environment = HorovodEnvironment()
        environment.global_rank(), environment.world_size()  # -> (0, 2) on rank 0, (1, 2) on rank 1
    """

    def __init__(self) -> None:
        super().__init__()
        hvd.init()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """The address for programs that create a process group of ``torch.distributed`` themselves."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "12910"))

    @staticmethod
    def detect() -> bool:
        """Whether ``horovodrun`` has started this process."""
        return "HOROVOD_RANK" in os.environ

    def world_size(self) -> int:
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has decided."""

    def global_rank(self) -> int:
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher has decided."""

    def local_rank(self) -> int:
        return hvd.local_rank()

    def node_rank(self) -> int:
        return hvd.cross_rank()
