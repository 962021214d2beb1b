"""What a program sends to all ranks at its start."""

from horoplug.common.objects import allgather_object as allgather_object
from horoplug.common.objects import broadcast_object as broadcast_object
