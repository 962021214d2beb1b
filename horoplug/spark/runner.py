"""The functions of ``horovod.spark.runner``."""

from .elastic import run_elastic
from .run import run

__all__ = ["run", "run_elastic"]
