"""Models, optimizers, learning-rate schedules and samplers as the state of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from horoplug.common.elastic import ObjectState
from horoplug.torch.elastic.sampler import ElasticSampler
from horoplug.torch.elastic.snapshot import Snapshot
from horoplug.torch.functions import (
    allgather_object as allgather_object,
)
from horoplug.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horoplug.torch.mpi_ops import rank


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
        self._saved = Snapshot()
        self.save()

    def save(self) -> None:
        self._saved.save(self.value.state_dict())

    def restore(self) -> None:
        # Another copy, since optimizers keep the tensors that they are given.
        self.value.load_state_dict(self._saved.value())

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(_DictHandler):
    """A ``torch.nn.Module``: parameters and buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_DictHandler):
    """A ``torch.optim.Optimizer``: state and options; the parameters are the model's."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class LRSchedulerStateHandler(_DictHandler):
    """A learning-rate schedule."""


class SamplerStateHandler(_DictHandler):
    """An :class:`ElasticSampler`."""

    def reset(self) -> None:
        self.value.reset()


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
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


class TorchState(ObjectState):
    """The state of a training run: ``TorchState(model, optimizer, sampler=sampler, epoch=0)``.

    Each argument becomes an attribute. For objects with a handler (models, optimizers, learning-rate schedules,
    samplers) their state is saved, also when the attribute is assigned; other objects are saved as in
    :class:`ObjectState`."""

    _handlers: Mapping[str, StateHandler] = {}  # the value while __init__ runs

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
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

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
            handler.save()  # restored after a failure before the first commit
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, StateHandler):  # users' handlers may lack this method
                handler.reset()
        super().reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
