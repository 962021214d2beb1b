"""Models, optimizers, learning-rate schedules and samplers as the state of a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DistributedSampler

from horoplug.common.elastic import ObjectState as ObjectState
from horoplug.common.elastic import check_alike
from horoplug.common.object_state import broadcast_values
from horoplug.common.progress import InPlaceState
from horoplug.torch.elastic.progress import TorchProgress, check_reductions, checksum
from horoplug.torch.elastic.sampler import ElasticSampler
from horoplug.torch.elastic.snapshot import Snapshot
from horoplug.torch.functions import allgather_object as allgather_object
from horoplug.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horoplug.torch.mpi_ops import rank, size


class StateHandler:
    """Saves, restores and synchronizes the state of one kind of object. ``value`` is the object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the object's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the object from the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast the object's state from rank 0. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new number of ranks."""

    def set_value(self, value: Any) -> None:
        """Replace the object, and save the state of the new one."""
        self.value = value
        self.save()


class _DictHandler(StateHandler):
    """An object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Snapshot | None = Snapshot()
        self.save()

    def keep_no_copy(self) -> None:
        """From now on, :meth:`save` and :meth:`restore` do nothing."""
        self._saved = None

    def read(self) -> Any:
        """The object's state; it may share memory with the object."""
        return self.value.state_dict()

    def write(self, state: Any) -> None:
        """Give the object a state, which it may keep."""
        self.value.load_state_dict(state)

    def save(self) -> None:
        if self._saved is not None:
            self._saved.save(self.read())

    def restore(self) -> None:
        if self._saved is not None:
            # Another copy, since optimizers keep the tensors that they are given.
            self.write(self._saved.value())

    def sync(self, root_rank: int = 0) -> None:
        name = type(self.value).__name__
        is_root = rank() == root_rank
        what = "in the state of the"
        values = {name: self.read() if is_root else None}
        found = broadcast_values(
            broadcast_object, values, root_rank, is_root=lambda: is_root, what=what
        )
        self.write(found[name])


class ModelStateHandler(_DictHandler):
    """A ``torch.nn.Module``: parameters and buffers."""

    def sync(self, root_rank: int = 0) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=root_rank)


class OptimizerStateHandler(_DictHandler):
    """A ``torch.optim.Optimizer``: state and options; the parameters are the model's."""

    def restore(self) -> None:
        super().restore()
        forget = getattr(self.value, "_forget_reductions", None)  # of a DistributedOptimizer
        if forget is not None:
            forget()

    def sync(self, root_rank: int = 0) -> None:
        broadcast_optimizer_state(self.value, root_rank=root_rank)


class LRSchedulerStateHandler(_DictHandler):
    """A learning-rate schedule."""


class GradScalerStateHandler(_DictHandler):
    """A ``torch.amp.GradScaler``. It cannot be pickled between ``unscale_`` and ``update``, where a failure may have
    interrupted a step. That step is forgotten."""

    def write(self, state: Any) -> None:
        super().write(state)
        if state and getattr(self.value, "_scale", None) is not None:
            self.value.update(state["scale"])  # also forgets which optimizers were unscaled


class GeneratorStateHandler(_DictHandler):
    """A ``torch.Generator``, which samplers and data loaders keep using."""

    def read(self) -> torch.Tensor:
        state: torch.Tensor = self.value.get_state()
        return state

    def write(self, state: torch.Tensor) -> None:
        self.value.set_state(state)


class SamplerStateHandler(_DictHandler):
    """An :class:`ElasticSampler`."""

    def reset(self) -> None:
        self.value.reset()


class DistributedSamplerStateHandler(_DictHandler):
    """A ``torch.utils.data.DistributedSampler``: its epoch. The rank and the number of ranks are those of the job."""

    def read(self) -> dict[str, int]:
        return {"epoch": self.value.epoch}

    def write(self, state: dict[str, int]) -> None:
        self.value.set_epoch(state["epoch"])

    def reset(self) -> None:
        sampler, epoch = self.value, self.value.epoch
        DistributedSampler.__init__(
            sampler,
            sampler.dataset,
            size(),
            rank(),
            sampler.shuffle,
            sampler.seed,
            sampler.drop_last,
        )
        sampler.set_epoch(epoch)


# Before PyTorch 2.3, torch.amp has no GradScaler. Since then, torch.cuda.amp.GradScaler derives from it.
_GradScaler: type = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler

_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (_GradScaler, GradScalerStateHandler),
    (torch.Generator, GeneratorStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (DistributedSampler, DistributedSamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs of a class and the handler of its objects. The first match is used."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the pairs, for states that are created from now on."""
    global _handler_registry
    _handler_registry = registry


def _handler(value: Any) -> StateHandler | None:
    return next((make(value) for kind, make in _handler_registry if isinstance(value, kind)), None)


class TorchState(InPlaceState):
    """The state of a training run: ``TorchState(model, optimizer, sampler=sampler, epoch=0)``.

    Each argument (``kwargs``) becomes an attribute. For objects with a handler (models, optimizers, learning-rate
    schedules, gradient scalers, generators, samplers) their state is saved, also when the attribute is assigned; other
    objects are saved as in :class:`horoplug.common.elastic.ObjectState`.

    ``rollback=False``: models and optimizers are not copied. After a failure, processes keep their parameters, which
    are those of a whole step, because a :class:`DistributedOptimizer` changes them only after all reductions of the
    step. Processes that are behind, and new ones, take over the state of the one that has got furthest; then all
    compare a checksum of the parameters. Call ``commit()`` directly after each step of the optimizer: if an operation
    fails between the two, that step's batch is repeated. With parameters on a GPU, each step waits for its reductions.
    Other objects return to the last commit. Raises ValueError if a handler does not support this.

    Example, on two ranks:

        model = torch.nn.Linear(2, 1, bias=False)
        state = hvd.elastic.TorchState(model, epoch=0)
        torch.nn.init.constant_(model.weight, 5.0)
        state.epoch = 1
        state.commit()
        torch.nn.init.constant_(model.weight, 7.0)
        state.epoch = 2
        state.restore()
        state.epoch, model.weight.detach()  # -> (1, [[5.0, 5.0]])
    """

    _handlers: Mapping[str, StateHandler] = {}  # the value while __init__ runs
    _progress: TorchProgress | None = None

    def __init__(
        self, model: Any = None, optimizer: Any = None, *, rollback: bool = True, **kwargs: Any
    ) -> None:
        handlers, others = {}, {}
        for name, value in {**kwargs, "model": model, "optimizer": optimizer}.items():
            if handler := _handler(value):
                handlers[name] = handler
            else:
                others[name] = value
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **others)
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        self._handlers = handlers
        self._progress = None if rollback else self._follow()

    def _follow(self) -> TorchProgress:
        """Keep no copies of models and optimizers, and count the steps."""
        progress = TorchProgress()
        for name, handler in self._handlers.items():
            if not isinstance(handler, _DictHandler):
                raise ValueError(
                    f"TorchState(rollback=False): the handler of {name!r}, a {type(handler).__name__}, cannot take "
                    "over the state of any rank"
                )
            if isinstance(handler, ModelStateHandler | OptimizerStateHandler):
                handler.keep_no_copy()
            if isinstance(handler, OptimizerStateHandler):
                progress.follow(handler.value)
        return progress

    def save(self) -> None:
        if self._progress is None:
            check_reductions(self._parameters())
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def _parameters(self) -> Iterator[torch.Tensor]:
        for handler in self._handlers.values():
            if isinstance(handler, ModelStateHandler):
                yield from handler.value.parameters()

    def _parts(self) -> dict[str, str]:
        """The type and shape of each tensor of the models; empty while a model has parameters without a shape."""
        found = {}
        for name, handler in self._handlers.items():
            if not isinstance(handler, ModelStateHandler):
                continue
            for key, tensor in handler.value.state_dict().items():
                if is_lazy(tensor):
                    return {}
                if isinstance(tensor, torch.Tensor):
                    kind = str(tensor.dtype).removeprefix("torch.")
                    found[f"{name}.{key}"] = f"{kind} {list(tensor.shape)}"
        return found

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        check_alike(self._parts())
        if self._progress is not None:
            self._sync_from_furthest(self._progress)
            return
        for handler in self._handlers.values():
            handler.sync()
            handler.save()  # restored after a failure before the first commit
        super().sync()

    def _dict_handlers(self) -> list[_DictHandler]:
        return [h for h in self._handlers.values() if isinstance(h, _DictHandler)]

    def _copy_own(self) -> Callable[[], None]:
        handlers = self._dict_handlers()
        copies = [Snapshot() for _ in handlers]
        for handler, copy in zip(handlers, copies, strict=True):
            copy.save(handler.read())

        def restore() -> None:
            for handler, copy in zip(handlers, copies, strict=True):
                handler.write(copy.value())

        return restore

    def _receive(self, root_rank: int) -> None:
        for handler in self._dict_handlers():
            handler.sync(root_rank)
            handler.save()
        self._sync_from(root_rank)

    def _checksums(self) -> list[list[int]]:
        models = [h.value for h in self._handlers.values() if isinstance(h, ModelStateHandler)]
        return [checksum(model.parameters()) for model in models]

    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, StateHandler):  # users' handlers may lack this method
                handler.reset()
        super().reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            handler = self._handlers[name]
            handler.set_value(value)
            if self._progress is not None and isinstance(handler, OptimizerStateHandler):
                self._progress.follow(value)
        super().__setattr__(name, value)
