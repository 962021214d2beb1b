"""What a rank can ask about the task of Spark in which it runs (``horovod.spark.task``)."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["get_available_devices"]

DEVICES: Final = "_HOROPLUG_SPARK_DEVICES"
"""The variable with the addresses of the task's GPUs, separated by commas."""


def get_available_devices() -> list[str]:
    """The addresses of the GPUs that Spark has assigned to this rank's task (``spark.task.resource.gpu.amount``), such
    as ``["0"]``; empty without GPUs, or outside of a rank.

    Raises nothing.

    Example, outside of a rank:

        import horoplug.spark.task

        horoplug.spark.task.get_available_devices()  # -> []
    """
    return [address for address in os.environ.get(DEVICES, "").split(",") if address]
