"""Horoplug on Ray: actors are the ranks.

    from horoplug.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(), num_workers=4)
    executor.start()
    results = executor.run(train)  # by rank
    executor.shutdown()

:class:`RayExecutor` runs functions on actors that stay, :class:`ElasticRayExecutor` replaces actors that fail and
follows the nodes of the cluster, and :class:`horoplug.ray.train.HoroplugTrainer` is a trainer of Ray Train."""

from packaging.version import Version as _Version

try:
    import ray as _ray
except ImportError as error:
    raise ImportError("horoplug.ray needs Ray: pip install 'horoplug[ray]'") from error
if _Version(_ray.__version__).release < (2, 43):  # a pre-release counts as the release
    raise ImportError(
        f"horoplug.ray needs Ray 2.43 or later, and this is {_ray.__version__}: pip install 'horoplug[ray]'"
    )

from horoplug.ray.elastic import ElasticRayExecutor
from horoplug.ray.runner import RayExecutor
from horoplug.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor"]
