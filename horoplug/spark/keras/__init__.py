"""Spark ML estimators for Keras 3 with any backend: ``from horoplug.spark.keras import KerasEstimator``."""

from horoplug.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
