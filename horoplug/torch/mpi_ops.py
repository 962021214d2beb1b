"""All operations on PyTorch tensors, and the functions of the job. (The module's name is Horovod's; it does not use
MPI.)"""

from horoplug.base.surface import declare as _declare
from horoplug.common.handle_api import *  # noqa: F403
from horoplug.torch.operations import *  # noqa: F403
from horoplug.torch.sparse_allreduce import sparse_allreduce_async as sparse_allreduce_async

_declare(globals())
