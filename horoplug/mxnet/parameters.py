"""``broadcast_parameters`` for MXNet."""

import types
from collections.abc import Mapping
from typing import Any

import mxnet as mx

from horoplug.common.basics import size
from horoplug.common.variants import synchronize
from horoplug.mxnet import operations

_Parameter = mx.gluon.parameter.Parameter
_Deferred = mx.gluon.parameter.DeferredInitializationError


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Give all ranks the parameters of rank `root_rank` (a global rank).

    ``params``: a dict of NDArrays, as ``Module.get_params()`` has, or of Gluon's parameters, as
    ``Block.collect_params()`` returns. A parameter whose shape is not known yet is sent when it is initialised.
    ``prefix``: begins the names of the operations, for a program that calls this function for several models.

    Raises ValueError for other kinds of ``params``, and HorovodInternalError if a rank has failed.

    Example, on two ranks:

        params = {"w": mx.nd.array([1.0 + hvd.rank(), 2.0])}
        hvd.broadcast_parameters(params, root_rank=0)
        params["w"]  # -> [1.0, 2.0]
    """
    if not isinstance(params, Mapping) and not hasattr(params, "items"):
        raise ValueError(
            f"params is a {type(params).__name__}; pass net.collect_params(), or a dict of NDArrays"
        )
    if size() == 1:
        return
    start: Any = vars(operations)["broadcast_async_"]
    handles = []
    for key, value in sorted(params.items()):
        name = f"{prefix or ''}{key}"
        try:
            tensor = value.data() if isinstance(value, _Parameter) else value
        except _Deferred:
            _broadcast_when_initialised(value, root_rank, name)
            continue
        handles.append(start(tensor, root_rank, name=name))
    for handle in handles:
        synchronize(handle)


def _broadcast_when_initialised(parameter: Any, root_rank: int, name: str) -> None:
    initialise = parameter._init_impl
    broadcast: Any = vars(operations)["broadcast_"]

    def initialise_and_broadcast(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(*args, **kwargs)
        broadcast(self.data(), root_rank, name=name)

    parameter._init_impl = types.MethodType(initialise_and_broadcast, parameter)
