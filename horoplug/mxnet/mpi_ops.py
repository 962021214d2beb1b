"""All operations on MXNet's NDArrays, and the functions of the job. (The module's name is Horovod's; it does not use
MPI.)"""

from horoplug.base.surface import declare as _declare
from horoplug.common.handle_api import *  # noqa: F403
from horoplug.mxnet.operations import *  # noqa: F403

_declare(globals())
