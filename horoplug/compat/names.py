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

MODULES: Final = {
    "horovod.common.basics": "horoplug.compat.basics",
    "horovod.common.elastic": "horoplug.common.elastic",
    "horovod.common.exceptions": "horoplug.common.errors",
    "horovod.common.process_sets": "horoplug.common.process_sets",
    "horovod.common.util": "horoplug.compat.util",
    "horovod.ray": "horoplug.ray",
    "horovod.ray.elastic": "horoplug.ray.elastic",
    "horovod.ray.elastic_v2": "horoplug.ray.elastic",
    "horovod.ray.ray_logger": "horoplug.ray.ray_logger",
    "horovod.ray.runner": "horoplug.ray.runner",
    "horovod.ray.utils": "horoplug.ray.utils",
    "horovod.ray.worker": "horoplug.ray.worker",
    "horovod.runner.common.util.secret": "horoplug.compat.secret",
    "horovod.runner.common.util.env": "horoplug.compat.env",
    "horovod.runner.common.util.timeout": "horoplug.compat.timeout",
    "horovod.runner.elastic.constants": "horoplug.compat.elastic_constants",
    "horovod.runner.elastic.discovery": "horoplug.runner.elastic.discovery",
    "horovod.runner.elastic.worker": "horoplug.common.elastic",
    "horovod.runner.launch": "horoplug.runner.horovod_launch",
    "horovod.runner.util.threads": "horoplug.compat.threads",
    "horovod.keras": "horoplug.keras",
    "horovod.keras.callbacks": "horoplug.keras.callbacks",
    "horovod.keras.elastic": "horoplug.keras.elastic",
    "horovod.spark": "horoplug.spark",
    "horovod.spark.common": "horoplug.spark.common",
    "horovod.spark.common.backend": "horoplug.spark.common.backend",
    "horovod.spark.common.estimator": "horoplug.spark.common.estimator",
    "horovod.spark.common.params": "horoplug.spark.common.params",
    "horovod.spark.common.store": "horoplug.spark.common.store",
    "horovod.spark.conf": "horoplug.spark.conf",
    "horovod.spark.keras": "horoplug.spark.keras",
    "horovod.spark.keras.estimator": "horoplug.spark.keras.estimator",
    "horovod.spark.lightning": "horoplug.spark.lightning",
    "horovod.spark.lightning.estimator": "horoplug.spark.lightning.estimator",
    "horovod.spark.runner": "horoplug.spark.runner",
    "horovod.spark.task": "horoplug.spark.task",
    "horovod.spark.torch": "horoplug.spark.torch",
    "horovod.spark.torch.estimator": "horoplug.spark.torch.estimator",
    "horovod.tensorflow": "horoplug.tensorflow",
    "horovod.tensorflow.compression": "horoplug.tensorflow.compression",
    "horovod.tensorflow.elastic": "horoplug.tensorflow.elastic",
    "horovod.tensorflow.functions": "horoplug.tensorflow.functions",
    "horovod.tensorflow.gradient_aggregation": "horoplug.tensorflow.gradient_aggregation",
    "horovod.tensorflow.gradient_aggregation_eager": "horoplug.tensorflow.gradient_aggregation_eager",
    "horovod.tensorflow.keras": "horoplug.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "horoplug.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "horoplug.tensorflow.keras.elastic",
    "horovod.tensorflow.mpi_ops": "horoplug.tensorflow.mpi_ops",
    "horovod.tensorflow.sync_batch_norm": "horoplug.tensorflow.sync_batch_norm",
    "horovod.tensorflow.util": "horoplug.tensorflow.util",
    "horovod.torch": "horoplug.torch",
    "horovod.torch.compression": "horoplug.torch.compression",
    "horovod.torch.elastic": "horoplug.torch.elastic",
    "horovod.torch.elastic.sampler": "horoplug.torch.elastic.sampler",
    "horovod.torch.elastic.state": "horoplug.torch.elastic.state",
    "horovod.torch.functions": "horoplug.torch.functions",
    "horovod.torch.mpi_ops": "horoplug.torch.mpi_ops",
    "horovod.torch.optimizer": "horoplug.torch.optimizer",
    "horovod.torch.sync_batch_norm": "horoplug.torch.sync_batch_norm",
}
"""The module of horoplug for each module of Horovod."""

ATTRIBUTES: Final = {
    "horovod.run": ("run", "horoplug.runner.run"),
    "horovod.runner.run": ("run", "horoplug.runner.run"),
}
"""The attributes of each package: (name, module of horoplug that defines it)."""

ADDED: Final = {
    "horovod.common.exceptions": (("get_version_mismatch_message", "horoplug.compat.util"),),
    "horovod.common.process_sets": (("_basics", "horoplug.compat.basics"),),
    "horovod.tensorflow.mpi_ops": (("_basics", "horoplug.compat.basics"),),
    "horovod.torch": (("_check_has_gpu", "horoplug.compat.util"),),
    "horovod.torch.mpi_ops": (("_basics", "horoplug.compat.basics"),),
}
"""Attributes that horoplug's modules lack, added on import: (name, module that defines it)."""

MISSING: Final = (
    "horovod._keras",
    "horovod.data",
    "horovod.mxnet",
    "horovod.ray.adapter",
    "horovod.ray.driver_service",
    "horovod.ray.strategy",
    "horovod.runner.common.service",
    "horovod.runner.common.util.address",
    "horovod.runner.common.util.codec",
    "horovod.runner.common.util.config_parser",
    "horovod.runner.common.util.host_hash",
    "horovod.runner.common.util.hosts",
    "horovod.runner.common.util.network",
    "horovod.runner.common.util.safe_shell_exec",
    "horovod.runner.common.util.settings",
    "horovod.runner.common.util.tiny_shell_exec",
    "horovod.runner.driver",
    "horovod.runner.elastic.driver",
    "horovod.runner.elastic.registration",
    "horovod.runner.elastic.rendezvous",
    "horovod.runner.elastic.settings",
    "horovod.runner.gloo_run",
    "horovod.runner.http",
    "horovod.runner.js_run",
    "horovod.runner.mpi_run",
    "horovod.runner.run_task",
    "horovod.runner.task",
    "horovod.runner.task_fn",
    "horovod.runner.util.cache",
    "horovod.runner.util.lsf",
    "horovod.runner.util.network",
    "horovod.runner.util.remote",
    "horovod.runner.util.streams",
    "horovod.spark.common.cache",
    "horovod.spark.common.constants",
    "horovod.spark.common.datamodule",
    "horovod.spark.common.serialization",
    "horovod.spark.common.util",
    "horovod.spark.data_loaders",
    "horovod.spark.driver",
    "horovod.spark.gloo_run",
    "horovod.spark.keras.bare",
    "horovod.spark.keras.datamodule",
    "horovod.spark.keras.optimizer",
    "horovod.spark.keras.remote",
    "horovod.spark.keras.tensorflow",
    "horovod.spark.keras.util",
    "horovod.spark.lightning.datamodule",
    "horovod.spark.lightning.legacy",
    "horovod.spark.lightning.remote",
    "horovod.spark.lightning.util",
    "horovod.spark.mpi_run",
    "horovod.spark.task.task_info",
    "horovod.spark.task.task_service",
    "horovod.spark.tensorflow",
    "horovod.spark.torch.datamodule",
    "horovod.spark.torch.remote",
    "horovod.spark.torch.util",
    "horovod.spark.util",
    "horovod.tensorflow.data",
    "horovod.tensorflow.mpi_lib",
    "horovod.torch.mpi_lib_v2",
)
"""Modules and functions of Horovod that horoplug does not have. Everything inside of these modules is missing, too."""


def _words(text: str) -> list[str]:
    return text.split()


_JOB = _words("""
    init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
    mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built
    rocm_built ProcessSet global_process_set add_process_set remove_process_set Average Sum Adasum Min Max Product
""")

_TORCH = [
    *_JOB,
    *_words("""
    HorovodInternalError allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async
    grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather
    grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter
    reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize
    """),
]

_TENSORFLOW = [
    *_JOB,
    *_words("""
    is_homogeneous allgather grouped_allgather broadcast broadcast_ alltoall join rank_op local_rank_op size_op
    local_size_op process_set_included_op
    """),
]

_KERAS = [
    *_JOB,
    *_words("""
    Compression DistributedOptimizer allgather allreduce broadcast broadcast_global_variables callbacks elastic
    load_model reducescatter
    """),
]

_KERAS_CALLBACKS = _words("""
    BestModelCheckpoint BroadcastGlobalVariablesCallback LearningRateScheduleCallback LearningRateWarmupCallback
    MetricAverageCallback
""")

_KERAS_ELASTIC = _words(
    "CommitStateCallback KerasState UpdateBatchStateCallback UpdateEpochStateCallback run"
)

NAMES: Final = {
    "horovod": ["__version__", "run"],
    "horovod.common.basics": ["HorovodBasics"],
    "horovod.common.elastic": _words(
        "State ObjectState run_fn notification_manager WorkerNotificationManager"
    ),
    "horovod.common.exceptions": [
        "HorovodInternalError",
        "HorovodVersionMismatchError",
        "HostsUpdatedInterrupt",
        "get_version_mismatch_message",
    ],
    "horovod.common.process_sets": _words(
        "ProcessSet global_process_set add_process_set remove_process_set _basics"
    ),
    "horovod.common.util": _words("""
        EXTENSIONS _cache ccl_built check_extension check_installed_version ddl_built env extension_available
        get_average_backwards_compatibility_fun get_ext_suffix get_extension_full_path gloo_built gpu_available
        is_iterable is_version_greater_equal_than mpi_built nccl_built num_rank_is_power_2 split_list
    """),
    "horovod.keras": [*_KERAS, "PartialDistributedOptimizer"],
    "horovod.keras.callbacks": _KERAS_CALLBACKS,
    "horovod.keras.elastic": _KERAS_ELASTIC,
    "horovod.ray": ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor"],
    "horovod.ray.elastic": ["ElasticRayExecutor", "RayHostDiscovery", "TestDiscovery"],
    "horovod.ray.elastic_v2": ["ElasticAdapter", "ElasticParams", "RayHostDiscovery"],
    "horovod.ray.ray_logger": ["configure", "log"],
    "horovod.ray.runner": _words("Coordinator MiniSettings RayExecutor StaticAdapter"),
    "horovod.ray.utils": ["detect_nics", "map_blocking", "nics_to_env_var"],
    "horovod.ray.worker": ["BaseHorovodWorker"],
    "horovod.runner": ["run"],
    "horovod.runner.common.util.env": _words("""
        IGNORE_REGEXES KUBEFLOW_MPI_EXEC LOG_LEVEL_STR get_env_rank_and_size is_exportable is_kubeflow_mpi
    """),
    "horovod.runner.common.util.secret": ["HOROVOD_SECRET_KEY", "make_secret_key"],
    "horovod.runner.common.util.timeout": ["Timeout", "TimeoutException"],
    "horovod.runner.elastic.constants": ["RESET_LIMIT_EXCEEDED_MESSAGE"],
    "horovod.runner.elastic.discovery": _words(
        "DiscoveredHosts FixedHosts HostDiscovery HostDiscoveryScript HostManager"
    ),
    "horovod.runner.launch": ["_run_elastic", "parse_args", "run_commandline"],
    "horovod.runner.elastic.worker": ["HostUpdateResult", "WorkerNotificationManager"],
    "horovod.runner.util.threads": ["execute_function_multithreaded", "in_thread", "on_event"],
    "horovod.spark": ["run", "run_elastic"],
    "horovod.spark.common": [],
    "horovod.spark.common.backend": ["Backend", "SparkBackend"],
    "horovod.spark.common.estimator": ["HorovodEstimator", "HorovodModel"],
    "horovod.spark.common.params": ["EstimatorParams", "ModelParams"],
    "horovod.spark.common.store": _words("""
        DBFSLocalStore FilesystemStore HDFSStore LocalStore Store
    """),
    "horovod.spark.conf": _words("""
        SPARK_CONF_ALWAYS_RESTART_FAILED_TASK SPARK_CONF_BLACKLIST_DISABLED SPARK_CONF_BLACKLIST_ENABLED
        SPARK_CONF_DEFAULT_VALUES SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR
        SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP SPARK_CONF_DONT_REUSE_FAILING_NODE
        SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK SPARK_CONF_MAX_INT
        SPARK_CONF_MAX_INT_MINUS_ONE SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK
        SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK SPARK_CONF_REUSE_FAILED_EXECUTOR
        SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP SPARK_CONF_REUSE_FAILING_NODE SPARK_CONF_REUSE_FAILING_NODE_IN_APP
        SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK
    """),
    "horovod.spark.keras": ["KerasEstimator", "KerasModel"],
    "horovod.spark.keras.estimator": ["KerasEstimator", "KerasModel"],
    "horovod.spark.lightning": ["TorchEstimator", "TorchModel"],
    "horovod.spark.lightning.estimator": ["TorchEstimator", "TorchModel"],
    "horovod.spark.runner": ["run", "run_elastic"],
    "horovod.spark.task": ["get_available_devices"],
    "horovod.spark.torch": ["TorchEstimator", "TorchModel"],
    "horovod.spark.torch.estimator": ["TorchEstimator", "TorchModel"],
    "horovod.tensorflow": [
        *_TENSORFLOW,
        *_words("""
        allreduce grouped_allreduce reducescatter grouped_reducescatter broadcast_variables broadcast_global_variables
        BroadcastGlobalVariablesHook broadcast_object broadcast_object_fn allgather_object DistributedOptimizer
        DistributedGradientTape PartialDistributedGradientTape SyncBatchNormalization LocalGradientAggregationHelper
        Compression compression elastic functions mpi_ops util _executing_eagerly _make_subgraph _cache vars_to_refs
        refs_to_vars handle_average_backwards_compatibility check_num_rank_power_of_2 gpu_available
        _make_allreduce_grads_fn _make_cached_allreduce_grads_fn
        """),
    ],
    "horovod.tensorflow.compression": _words(
        "Compression Compressor FP16Compressor NoneCompressor"
    ),
    "horovod.tensorflow.elastic": _words("TensorFlowKerasState TensorFlowState run"),
    "horovod.tensorflow.functions": _words("""
        BroadcastGlobalVariablesHook allgather_object broadcast_global_variables broadcast_object broadcast_object_fn
        broadcast_variables
    """),
    "horovod.tensorflow.gradient_aggregation": ["LocalGradientAggregationHelper"],
    "horovod.tensorflow.gradient_aggregation_eager": ["LocalGradientAggregationHelperEager"],
    "horovod.tensorflow.keras": _KERAS,
    "horovod.tensorflow.keras.callbacks": _KERAS_CALLBACKS,
    "horovod.tensorflow.keras.elastic": _KERAS_ELASTIC,
    "horovod.tensorflow.mpi_ops": [*_TENSORFLOW, "_basics"],
    "horovod.tensorflow.sync_batch_norm": ["SyncBatchNormalization"],
    "horovod.tensorflow.util": _words("""
        _cache _executing_eagerly _make_subgraph refs_to_vars vars_to_refs
    """),
    "horovod.torch": [
        *_TORCH,
        *_words("""
        elastic mpi_ops optimizer functions compression sync_batch_norm Compression allgather_object broadcast_object
        broadcast_optimizer_state broadcast_parameters DistributedOptimizer SyncBatchNorm _check_has_gpu
        """),
    ],
    "horovod.torch.compression": _words("Compression Compressor FP16Compressor NoneCompressor"),
    "horovod.torch.elastic": ["ElasticSampler", "TorchState", "run", "sampler", "state"],
    "horovod.torch.elastic.sampler": ["ElasticSampler", "rank", "size"],
    "horovod.torch.elastic.state": _words("""
        ElasticSampler ModelStateHandler ObjectState OptimizerStateHandler SamplerStateHandler StateHandler TorchState
        allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters get_handler_registry rank
        set_handler_registry
    """),
    "horovod.torch.functions": _words("""
        allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
    """),
    "horovod.torch.mpi_ops": [*_TORCH, "_basics", "is_homogeneous"],
    "horovod.torch.optimizer": ["DistributedOptimizer", "_DistributedOptimizer"],
    "horovod.torch.sync_batch_norm": ["SyncBatchNorm"],
}
"""The names in Horovod's modules that programs use."""
