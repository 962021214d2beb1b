"""``horovod.runner.elastic.constants``."""

from typing import Final

RESET_LIMIT_EXCEEDED_MESSAGE: Final = "the job was formed again {} time"
"""How the error begins with which a job ends that reaches its ``reset_limit``, which is filled in."""
