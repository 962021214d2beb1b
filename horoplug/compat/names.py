"""The names of Horovod 0.28.1 and their counterparts in horoplug, as tables."""

from typing import Final

VERSION: Final = "0.28.1"
"""The version of Horovod whose interface is provided; the value of ``horovod.__version__``."""

PACKAGES: Final = (
    "horovod",
    "horovod.common",
    "horovod.runner",
    "horovod.runner.common",
    "horovod.runner.common.util",
    "horovod.runner.elastic",
    "horovod.runner.util",
)
"""Packages that contain only submodules."""

# Modules that have the same name in both.
_SAME_NAMES: Final = """
    common.elastic common.process_sets ray ray.elastic ray.ray_logger ray.runner ray.utils ray.worker
    runner.elastic.discovery keras keras.callbacks keras.elastic mxnet mxnet.compression mxnet.functions
    mxnet.mpi_ops spark spark.common spark.common.backend spark.common.estimator spark.common.params
    spark.common.store spark.conf spark.keras spark.keras.estimator spark.lightning spark.lightning.estimator
    spark.runner spark.task spark.torch spark.torch.estimator tensorflow tensorflow.compression
    tensorflow.elastic tensorflow.functions tensorflow.gradient_aggregation
    tensorflow.gradient_aggregation_eager tensorflow.keras tensorflow.keras.callbacks tensorflow.keras.elastic
    tensorflow.mpi_ops tensorflow.sync_batch_norm tensorflow.util torch torch.compression torch.elastic
    torch.elastic.sampler torch.elastic.state torch.functions torch.mpi_ops torch.optimizer
    torch.sync_batch_norm
"""
MODULES: Final = {
    **{f"horovod.{name}": f"horoplug.{name}" for name in _SAME_NAMES.split()},
    "horovod.common.basics": "horoplug.compat.basics",
    "horovod.common.exceptions": "horoplug.common.errors",
    "horovod.common.util": "horoplug.compat.util",
    "horovod.ray.elastic_v2": "horoplug.ray.elastic",
    "horovod.runner.common.util.secret": "horoplug.compat.secret",
    "horovod.runner.common.util.env": "horoplug.compat.env",
    "horovod.runner.common.util.timeout": "horoplug.compat.timeout",
    "horovod.runner.elastic.constants": "horoplug.compat.elastic_constants",
    "horovod.runner.elastic.worker": "horoplug.common.elastic",
    "horovod.runner.launch": "horoplug.runner.horovod_launch",
    "horovod.runner.util.threads": "horoplug.compat.threads",
}
"""The module of horoplug for each module of Horovod."""

ATTRIBUTES: Final = {
    "horovod.run": ("run", "horoplug.runner.run"),
    "horovod.runner.run": ("run", "horoplug.runner.run"),
}
"""The attributes of each package: (name, module of horoplug that defines it)."""

_MISSING: Final = """
    _keras data ray.adapter ray.driver_service ray.strategy runner.common.service runner.common.util.address
    runner.common.util.codec runner.common.util.config_parser runner.common.util.host_hash
    runner.common.util.hosts runner.common.util.network runner.common.util.safe_shell_exec
    runner.common.util.settings runner.common.util.tiny_shell_exec runner.driver runner.elastic.driver
    runner.elastic.registration runner.elastic.rendezvous runner.elastic.settings runner.gloo_run runner.http
    runner.js_run runner.mpi_run runner.run_task runner.task runner.task_fn runner.util.cache runner.util.lsf
    runner.util.network runner.util.remote runner.util.streams spark.common.cache spark.common.constants
    spark.common.datamodule spark.common.serialization spark.common.util spark.data_loaders spark.driver
    spark.gloo_run spark.keras.bare spark.keras.datamodule spark.keras.optimizer spark.keras.remote
    spark.keras.tensorflow spark.keras.util spark.lightning.datamodule spark.lightning.legacy
    spark.lightning.remote spark.lightning.util spark.mpi_run spark.task.task_info spark.task.task_service
    spark.tensorflow spark.torch.datamodule spark.torch.remote spark.torch.util spark.util tensorflow.data
    tensorflow.mpi_lib torch.mpi_lib_v2
"""
MISSING: Final = tuple(f"horovod.{name}" for name in _MISSING.split())
"""Modules and functions of Horovod that horoplug does not have. Everything inside of these modules is missing, too."""


def table(text: str) -> dict[str, str]:
    """The rows ``key: value`` of a text. A line that is indented continues the value of the row above."""
    rows: dict[str, str] = {}
    key = ""
    for line in text.strip().splitlines():
        if line.startswith(" "):
            rows[key] += line
        else:
            key, _, rows[key] = line.partition(": ")
    return rows
