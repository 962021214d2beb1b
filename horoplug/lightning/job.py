"""What the strategies of Trainer and Fabric share: the devices and collectives of a job, and its optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

import horoplug.torch as hvd

_OPS = {
    "mean": hvd.Average,
    "avg": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
}


class JobMixin:
    """Methods that Lightning calls under the same name on the strategies of Trainer and Fabric.

    The gradients of all optimizers are reduced while backward runs, and :meth:`_synchronize` waits for them at its end.
    So hooks, gradient clipping and gradient scalers see the same gradients on all ranks, as with DDP."""

    parallel_devices: list[torch.device] | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._wrapped: list[Any] = []
        self._paused = False

    # ---- the processes -----------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Join the job, if this process has left it since the strategy was created."""
        hvd.init()
        super().setup_environment()  # type: ignore[misc]

    def set_world_ranks(self) -> None:
        """Tell Lightning's functions for rank 0, such as its logging, which rank this is."""
        rank_zero_only.rank = utilities_rank_zero_only.rank = hvd.rank()

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def num_nodes(self) -> int:
        return hvd.cross_size()

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        """Lightning sets its own argument, which the launcher has decided already."""

    @property
    def root_device(self) -> torch.device:
        """The device of this rank: the one with its local rank, or the only one that it sees."""
        devices, local = self.parallel_devices or [torch.device("cpu")], hvd.local_rank()
        if devices[0].type == "cpu":
            return devices[0]
        if local < len(devices):
            return devices[local]
        if torch.cuda.device_count() > 1:
            raise ValueError(
                f"rank {hvd.rank()} is process {local} of its host, and devices= has {len(devices)} of them: "
                "pass devices='auto', or one device per process of a host"
            )
        return devices[0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    # ---- collectives -------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return hvd.broadcast_object(obj, src)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """The tensors of all ranks, stacked along a new first dimension. Their shapes are equal."""
        with contextlib.nullcontext() if sync_grads else torch.no_grad():
            return hvd.allgather(tensor.unsqueeze(0), process_set=_process_set(group))

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a tensor; other values are returned as they are. Raises ValueError for an operation or a group of
        ``torch.distributed`` that horoplug does not have."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        if name not in _OPS:
            raise ValueError(
                f"HorovodStrategy reduces with {', '.join(_OPS)}, not with {reduce_op}"
            )
        op, process_set = _OPS[name], _process_set(group)
        if op == hvd.Average and not (tensor.is_floating_point() or tensor.is_complex()):
            total = hvd.allreduce(tensor, op=hvd.Sum, process_set=process_set)
            return (total / (process_set.size() or 1)).to(tensor.dtype)
        return hvd.allreduce(tensor, op=op, process_set=process_set)

    # ---- models and optimizers ---------------------------------------------------------------------------------------

    def _broadcast_module(self, module: torch.nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        tensors = [*module.named_parameters(), *module.named_buffers()]
        hvd.broadcast_parameters(dict(tensors), root_rank=0)

    def _wrap(
        self, optimizer: Any, named_parameters: Iterable[tuple[str, Any]], options: dict[str, Any]
    ) -> Any:
        """A DistributedOptimizer in place of ``optimizer``, with the state of rank 0. Collective."""
        known = {parameter: name for name, parameter in named_parameters}
        own = [p for group in optimizer.param_groups for p in group["params"]]
        number = len(self._wrapped)
        names = [(known.get(p, f"optimizer.{number}.{n}"), p) for n, p in enumerate(own)]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=names, **options)
        self._wrapped.append(wrapped)
        return wrapped

    def _unwrap_all(self) -> None:
        """Stop reducing gradients: parameters outlive the optimizers of one ``fit``."""
        for optimizer in self._wrapped:
            for hook in optimizer._grad_accs:
                hook.remove()
        self._wrapped = []

    def _synchronize(self) -> None:
        if not self._paused:
            for optimizer in self._wrapped:
                optimizer.synchronize()

    def _stepping(self, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
        """A context for a step of an optimizer, whose gradients :meth:`_synchronize` has reduced."""
        if optimizer in self._wrapped:
            stepping: contextlib.AbstractContextManager[Any] = optimizer.skip_synchronize()
            return stepping
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        outer, self._paused = self._paused, True
        try:
            with contextlib.ExitStack() as stack:
                for optimizer in self._wrapped:
                    stack.enter_context(optimizer.no_sync())
                yield
        finally:
            self._paused = outer

    def teardown(self) -> None:
        self._unwrap_all()
        super().teardown()  # type: ignore[misc]


def _process_set(group: Any) -> hvd.ProcessSet:
    if group is None:
        return hvd.global_process_set
    if isinstance(group, hvd.ProcessSet):
        return group
    raise ValueError(
        f"HorovodStrategy takes a process set of horoplug as a group, got {type(group).__name__}"
    )
