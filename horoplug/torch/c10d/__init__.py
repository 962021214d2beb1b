"""The backend "horoplug" of ``torch.distributed``: ``init_process_group("horoplug")``."""

from horoplug.torch.c10d.gloo import replace_gloo
from horoplug.torch.c10d.process_group import ProcessGroup

__all__ = ["ProcessGroup", "replace_gloo"]
