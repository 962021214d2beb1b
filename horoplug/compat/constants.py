"""Constants of Horovod's modules, which programs import."""

import logging
from typing import Final

logger = logging.getLogger("horoplug")

# ---- horovod.runner.elastic ------------------------------------------------------------------------------------------

DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS: Final = 1
DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS: Final = 3600

# The names of variables.
HOROVOD_GLOO_IFACE: Final = "HOROVOD_GLOO_IFACE"
HOROVOD_GLOO_RENDEZVOUS_ADDR: Final = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
HOROVOD_GLOO_RENDEZVOUS_PORT: Final = "HOROVOD_GLOO_RENDEZVOUS_PORT"
HOROVOD_HOSTNAME: Final = "HOROVOD_HOSTNAME"
HOROVOD_LOCAL_RANK: Final = "HOROVOD_LOCAL_RANK"

# ---- horovod.spark.lightning.estimator -------------------------------------------------------------------------------

MIN_PL_VERSION: Final = "1.3.8"
"""The oldest Lightning that Horovod takes. horoplug needs Lightning 2."""

# ---- horovod.tensorflow ----------------------------------------------------------------------------------------------

_IS_TF2: Final = True
_POST_TF_2_4_0: Final = True

# ---- horovod.torch ---------------------------------------------------------------------------------------------------

_MPI_LIB_AVAILABLE: Final = True
_NULL: Final = ""
