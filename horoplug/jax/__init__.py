"""Horoplug for JAX: ``import horoplug.jax as hvd``.

hvd.init()
params = hvd.broadcast_parameters(params, root_rank=0)
optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))

@jax.jit
def train_step(params, state, batch):
    gradients = jax.grad(loss)(params, batch)
    updates, state = optimizer.update(gradients, state, params)  # the mean of all ranks' gradients
    return optax.apply_updates(params, updates), state
"""

try:
    import jax as _jax
except ImportError as error:
    raise ImportError("horoplug.jax needs JAX: pip install jax") from error
if _jax.__version_info__ < (0, 5):  # XLA crashes there on ordered effects
    raise ImportError(
        f"horoplug.jax needs JAX 0.5 or newer, and this is {_jax.__version__}: pip install -U jax"
    )

from horoplug.base.surface import declare as _declare
from horoplug.common.api import *  # noqa: F403
from horoplug.jax import elastic as elastic
from horoplug.jax.compression import Compression as Compression
from horoplug.jax.functions import *  # noqa: F403
from horoplug.jax.mpi_ops import *  # noqa: F403
from horoplug.jax.optimizer import DistributedOptimizer as DistributedOptimizer
from horoplug.jax.optimizer import distributed_grad as distributed_grad
from horoplug.jax.optimizer import distributed_value_and_grad as distributed_value_and_grad

_declare(globals(), "elastic")
