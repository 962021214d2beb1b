"""Horoplug for MXNet 1.9: ``import horoplug.mxnet as hvd``. The functions, their arguments and defaults are Horovod's.

    hvd.init()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01 * hvd.size()})
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)

An operation returns when its result is there, unlike Horovod's, which MXNet's engine runs later. Arrays must be dense
and in host memory."""

try:
    import mxnet as _mxnet  # noqa: F401
except ImportError as error:
    raise ImportError(
        "horoplug.mxnet needs MXNet 1.9: pip install 'horoplug[mxnet]', with Python 3.11 or older"
    ) from error

from horoplug.base.surface import declare as _declare
from horoplug.mxnet import elastic as elastic
from horoplug.mxnet import mpi_ops as mpi_ops
from horoplug.mxnet.compression import Compression as Compression
from horoplug.mxnet.mpi_ops import *  # noqa: F403
from horoplug.mxnet.optimizer import DistributedOptimizer as DistributedOptimizer
from horoplug.mxnet.optimizer import DistributedTrainer as DistributedTrainer
from horoplug.mxnet.parameters import broadcast_parameters as broadcast_parameters

_declare(globals(), "elastic", "mpi_ops")
