"""Settings of Spark for jobs whose tasks or executors fail, under Horovod's names: pairs for ``SparkConf.set``.

    builder.config(*conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK)

The settings have the names of Spark 3.1 and later, in which ``spark.blacklist`` is ``spark.excludeOnFailure``. All but
the first one have an effect only with :data:`SPARK_CONF_BLACKLIST_ENABLED`."""

from typing import Final

SPARK_CONF_MAX_INT: Final = str(2**31 - 1)
SPARK_CONF_MAX_INT_MINUS_ONE: Final = str(2**31 - 2)

_PREFIX: Final = "spark.excludeOnFailure."
_STAGE_EXECUTOR: Final = f"{_PREFIX}stage.maxFailedTasksPerExecutor"
_STAGE_NODE: Final = f"{_PREFIX}stage.maxFailedExecutorsPerNode"
_TASK_EXECUTOR: Final = f"{_PREFIX}task.maxTaskAttemptsPerExecutor"
_TASK_NODE: Final = f"{_PREFIX}task.maxTaskAttemptsPerNode"
_APP_EXECUTOR: Final = f"{_PREFIX}application.maxFailedTasksPerExecutor"
_APP_NODE: Final = f"{_PREFIX}application.maxFailedExecutorsPerNode"

# For elastic jobs: horoplug has limits of its own.
SPARK_CONF_ALWAYS_RESTART_FAILED_TASK: Final = ("spark.task.maxFailures", SPARK_CONF_MAX_INT)

SPARK_CONF_BLACKLIST_DISABLED: Final = (f"{_PREFIX}enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED: Final = (f"{_PREFIX}enabled", "true")

# Whether executors where tasks have failed, and nodes of such executors, get further tasks of the stage.
SPARK_CONF_REUSE_FAILED_EXECUTOR: Final = (_STAGE_EXECUTOR, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR: Final = (_STAGE_EXECUTOR, "1")
SPARK_CONF_REUSE_FAILING_NODE: Final = (_STAGE_NODE, SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_DONT_REUSE_FAILING_NODE: Final = (_STAGE_NODE, "1")

# Whether they get the same task again.
SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK: Final = (_TASK_EXECUTOR, SPARK_CONF_MAX_INT)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK: Final = (_TASK_EXECUTOR, "2")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK: Final = (_TASK_EXECUTOR, "1")
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK: Final = (_TASK_NODE, SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK: Final = (_TASK_NODE, "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK: Final = (_TASK_NODE, "1")

# Whether they get tasks of other stages of the application.
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP: Final = (_APP_EXECUTOR, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP: Final = (_APP_EXECUTOR, "1")
SPARK_CONF_REUSE_FAILING_NODE_IN_APP: Final = (_APP_NODE, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP: Final = (_APP_NODE, "1")

SPARK_CONF_DEFAULT_VALUES: Final = {
    "spark.task.maxFailures": "4",
    f"{_PREFIX}enabled": "false",
    _STAGE_EXECUTOR: "2",
    _STAGE_NODE: "2",
    _TASK_EXECUTOR: "1",
    _TASK_NODE: "2",
    _APP_EXECUTOR: "2",
    _APP_NODE: "2",
}
"""Spark's own defaults."""
