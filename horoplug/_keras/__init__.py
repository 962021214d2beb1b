"""The common part of :mod:`horoplug.keras` and :mod:`horoplug.tensorflow.keras`.

Modules here do not import Keras at the top level: both Keras 3 and Keras 2 (``tf_keras``) may be installed, and the
callers decide which one is used."""
