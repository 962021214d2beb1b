"""What the modules of frameworks whose operations have handles export, except the operations on tensors:
``from horoplug.common.handle_api import *``."""

from horoplug.base.surface import declare as _declare
from horoplug.common.api import *  # noqa: F403
from horoplug.common.objects import allgather_object as allgather_object
from horoplug.common.objects import broadcast_object as broadcast_object
from horoplug.common.objects import recv_object as recv_object
from horoplug.common.objects import send_object as send_object
from horoplug.common.variants import barrier as barrier
from horoplug.common.variants import join as join
from horoplug.common.variants import poll as poll
from horoplug.common.variants import synchronize as synchronize

_declare(globals())
