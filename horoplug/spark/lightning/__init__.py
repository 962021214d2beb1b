"""Spark ML estimators for Lightning 2: ``from horoplug.spark.lightning import TorchEstimator``."""

from horoplug.spark.lightning.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
