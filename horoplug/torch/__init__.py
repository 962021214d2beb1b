"""Horoplug for PyTorch: ``import horoplug.torch as hvd``. The functions, their arguments and defaults are Horovod's.

hvd.init()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from horoplug.base.surface import declare as _declare
from horoplug.torch import elastic as elastic
from horoplug.torch import mpi_ops as mpi_ops
from horoplug.torch.compression import Compression as Compression
from horoplug.torch.functions import broadcast_optimizer_state as broadcast_optimizer_state
from horoplug.torch.functions import broadcast_parameters as broadcast_parameters
from horoplug.torch.mpi_ops import *  # noqa: F403
from horoplug.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from horoplug.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from horoplug.torch_plugin import register as _register

_register()
_declare(globals(), "elastic", "mpi_ops")
