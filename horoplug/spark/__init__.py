"""Ranks in the tasks of a Spark application: ``horoplug.spark.run`` calls a function on them.

Importing the package loads neither Spark nor a framework."""

from horoplug.runner.ending.results import RankError

from .dataframe import run_on_dataframe
from .elastic import run_elastic
from .run import run

__all__ = ["RankError", "run", "run_elastic", "run_on_dataframe"]
