"""``DistributedOptimizer`` for MXNet's modules, and ``DistributedTrainer`` for Gluon."""

import warnings
from typing import Any

import mxnet as mx

from horoplug.common.compression import AnyCompressor
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduction_options import ReductionOptions
from horoplug.mxnet.compression import Compression
from horoplug.mxnet.gradients import average

_OWN = ("_optimizer", "_options")


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer that averages gradients over the ranks before it updates weights.

        optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.01 * hvd.size()))
        module.fit(data, optimizer=optimizer, ...)

    ``optimizer``: an optimizer of MXNet, whose attributes this one has. ``gradient_predivide_factor``: gradients are
    divided by it before the sum and multiplied by it after the average. ``num_groups``: the number of groups of
    gradients that are reduced together. ``process_set``: the ranks that take part; others update with their own
    gradients.

    Raises ValueError for invalid arguments. ``update`` raises HorovodInternalError if a rank has failed.

    Example, on two ranks:

        sgd = mx.optimizer.create("sgd", learning_rate=0.25 * hvd.size())
        optimizer = hvd.DistributedOptimizer(sgd)
        w = mx.nd.array([1.0, 1.0])
        gradient = mx.nd.array([3.0, 3.0]) * hvd.rank()  # 0 and 3
        optimizer.update(0, w, gradient, optimizer.create_state(0, w))
        w  # -> [0.25, 0.25]
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        options = ReductionOptions(
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            process_set=process_set,
        )
        self.__dict__.update(_optimizer=optimizer, _options=options)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not made yet, such as by pickle
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)

    def __reduce__(self) -> Any:
        options = self._options
        return type(self), (self._optimizer, options.gradient_predivide_factor, options.groups or 0)

    def create_state(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._average(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._average(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr: float) -> None:
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        self._optimizer.set_wd_mult(args_wd_mult)

    def _average(self, index: Any, grad: Any) -> None:
        is_list = isinstance(index, (list, tuple))
        names, gradients = (index, grad) if is_list else ([index], [grad])
        average(self._options, [str(name) for name in names], gradients)


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """Gluon's trainer, which averages gradients over the ranks before it updates parameters.

        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01 * hvd.size()})
        hvd.broadcast_parameters(net.collect_params(), root_rank=0)
        ...
        loss.backward()
        trainer.step(batch_size)

    ``params``, ``optimizer``, ``optimizer_params``: see ``mxnet.gluon.Trainer``. ``compression``: a value of
    ``hvd.Compression``. ``gradient_predivide_factor``, ``num_groups``, ``process_set``: see
    :class:`DistributedOptimizer`. ``prefix``: begins the names of this trainer's operations, so that a program can have
    several trainers.

    ``step`` raises ValueError for a parameter with a sparse gradient or on several devices, and HorovodInternalError if
    a rank has failed or the ranks have different parameters.

    Example, on two ranks:

        net = mx.gluon.nn.Dense(1, use_bias=False, in_units=2)
        net.initialize(mx.init.One())
        options = {"learning_rate": 0.25 * hvd.size()}
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", options)
        with mx.autograd.record():
            loss = net(mx.nd.array([[3.0, 3.0]]) * hvd.rank())  # the gradients are 0 and 3
        loss.backward()
        trainer.step(1)
        net.weight.data()  # -> [[0.25, 0.25]]
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: AnyCompressor = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer._optimizer
            warnings.warn(
                "DistributedTrainer averages gradients itself: it takes the optimizer inside the DistributedOptimizer",
                stacklevel=2,
            )
        self._options = ReductionOptions(
            compression=compression,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            process_set=process_set,
        )
        self._prefix = prefix or ""
        # The parameters have the same order on all ranks.
        params = sorted(params) if isinstance(params, (list, tuple)) else params
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)

    def _allreduce_grads(self) -> None:
        names, gradients = [], []
        for i, param in enumerate(self._params):
            if param.grad_req == "null":
                continue
            found = param.list_grad()
            if len(found) > 1:
                raise ValueError(
                    f"parameter {param.name} is on several devices; start a rank for each device"
                )
            names.append(f"{self._prefix}{i}")
            gradients += found
        average(self._options, names, gradients)
