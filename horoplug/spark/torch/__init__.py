"""Spark ML estimators for PyTorch: ``from horoplug.spark.torch import TorchEstimator``."""

from horoplug.spark.torch.estimator import TorchEstimator as TorchEstimator
from horoplug.spark.torch.estimator import TorchModel as TorchModel
