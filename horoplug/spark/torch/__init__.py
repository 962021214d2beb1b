"""Spark ML estimators for PyTorch: ``from horoplug.spark.torch import TorchEstimator``."""

from horoplug.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
