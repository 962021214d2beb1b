"""The class ``Backend`` of PyTorch in front of a process group of horoplug.

``torch.distributed`` takes a process group of horoplug as it is. Libraries that build groups from PyTorch's own parts,
such as torchft, need a ``Backend`` instead. Python classes can be one since PyTorch 2.14."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C import _distributed_c10d

from horoplug.torch.c10d.work import Work
from horoplug.torch.dynamo import run_methods_eagerly

_Base: Any = _distributed_c10d.Backend


def _can_be_subclassed() -> bool:
    try:
        _Base(0, 1)
    except TypeError:  # no constructor
        return False
    return True


IS_POSSIBLE = _can_be_subclassed()

# PyTorch's C++ code finds the methods by these names.
_OPERATIONS = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "barrier", "send", "recv", "recv_anysource"),
    *("allgather", "_allgather_base", "all_gather_single", "all_gather_single_coalesced", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip


class Backend(_Base):  # type: ignore[misc]
    """Passes all operations on to ``group``."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def __getattr__(self, name: str) -> Any:  # for what the base class does not have
        if name == "group":
            raise AttributeError(name)
        return getattr(self.group, name)

    def rank(self) -> int:
        return int(self.group.rank())

    def size(self) -> int:
        return int(self.group.size())

    supports_reconfigure = True

    def get_reconfigure_handle(self) -> str:
        return str(self.group.get_reconfigure_handle())

    def reconfigure(self, opts: Any) -> Any:
        """See ``ProcessGroup.reconfigure``. Raises ValueError if the rank or the number of ranks would change: PyTorch
        keeps those of a backend in C++, where a Python class cannot set them."""
        rank, size = self.group.position(opts)
        if (rank, size) != (_Base.rank(self), _Base.size(self)):
            raise ValueError(
                f"a backend of horoplug cannot become rank {rank} of {size}, since it was created as rank "
                f"{_Base.rank(self)} of {_Base.size(self)}: use a group of torch.distributed, or "
                "horoplug.torch.c10d.torchft.ProcessGroupHoroplug"
            )
        return self.group.reconfigure(opts)

    def name(self) -> str:
        return str(self.group.own_names[-1])

    getBackendName = name

    @property
    def options(self) -> Any:
        return self.group.options

    def set_timeout(self, timeout: Any) -> None:
        self.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self.group.monitored_barrier(getattr(opts, "timeout", opts), wait_all_ranks)

    def start_coalescing(self) -> None:
        self.group._start_coalescing()

    def end_coalescing(self) -> Any:
        return self.group._end_coalescing()

    def abort(self) -> None:
        self.group.abort()

    def shutdown(self) -> None:
        self.group.shutdown()


def _passed_on(name: str) -> Callable[..., Any]:
    def operation(self: Backend, *args: Any, **options: Any) -> Any:
        work = getattr(self.group, name)(*args, **options)
        # PyTorch's C++ code expects a Work also from a blocking call.
        return Work(self.group._operations, (), None, (), None) if work is None else work

    operation.__name__ = name
    return operation


for _name in _OPERATIONS:
    setattr(Backend, _name, _passed_on(_name))
run_methods_eagerly(Backend)
