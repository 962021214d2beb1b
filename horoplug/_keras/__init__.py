"""What :mod:`horoplug.keras` and :mod:`horoplug.tensorflow.keras` share. Nothing here imports Keras: both Keras 3 and
Keras 2 (``tf_keras``) may be installed, and the callers know which they mean."""
