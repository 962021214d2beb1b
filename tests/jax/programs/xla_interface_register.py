import sys

import jax

from horoplug.jax.library import _register
from tests.harness.xla_calls import handler_of_version

handler = handler_of_version(1, 0)  # XLA keeps its address
if "after" in sys.argv:
    jax.devices()
try:
    _register("horoplug_test", handler, "cpu")
    jax.devices()
except Exception as error:
    print(type(error).__name__, error)
