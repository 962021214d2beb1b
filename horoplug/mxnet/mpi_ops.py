"""All operations on MXNet's NDArrays, and the functions of the job. (The module's name is Horovod's; it does not use
MPI.)"""

from horoplug.common.api import *  # noqa: F403
from horoplug.common.objects import recv_object as recv_object
from horoplug.common.objects import send_object as send_object
from horoplug.common.variants import barrier as barrier
from horoplug.common.variants import join as join
from horoplug.common.variants import poll as poll
from horoplug.common.variants import synchronize as synchronize
from horoplug.mxnet.operations import *  # noqa: F403
