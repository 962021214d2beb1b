"""What becomes of each name that Horovod's modules have and horoplug's modules lack, as tables.

:mod:`horoplug.compat.surface` lists all names of Horovod. A name is one of these:

- an attribute of the module of horoplug;
- imported by Horovod from another of its modules, where it is looked up;
- in :data:`EQUIVALENTS`, made by horoplug.compat;
- in :data:`LACKING`, with what to use instead."""

from typing import Final

EQUIVALENTS: Final[dict[str, dict[str, str]]] = {
    "horoplug.compat.basics": {
        "horovod.common.process_sets": "HorovodBasics _basics",
        "horovod.mxnet.mpi_ops": "_basics",
        "horovod.tensorflow.mpi_ops": "_basics",
        "horovod.torch.mpi_ops": "_basics",
    },
    "horoplug.compat.constants": {
        "horovod.ray.elastic": "logger",
        "horovod.ray.elastic_v2": "logger",
        "horovod.ray.runner": "logger",
        "horovod.runner.elastic.discovery": """
            DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS
        """,
        "horovod.runner.elastic.worker": """
            HOROVOD_GLOO_IFACE HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT HOROVOD_HOSTNAME
            HOROVOD_LOCAL_RANK
        """,
        "horovod.spark.lightning.estimator": "MIN_PL_VERSION",
        "horovod.tensorflow": "_IS_TF2",
        "horovod.tensorflow.elastic": "_IS_TF2",
        "horovod.tensorflow.gradient_aggregation": "_IS_TF2",
        "horovod.tensorflow.gradient_aggregation_eager": "_IS_TF2 _POST_TF_2_4_0",
        "horovod.torch": "_MPI_LIB_AVAILABLE",
        "horovod.torch.mpi_ops": "_NULL",
    },
    "os": {"horovod.spark.runner": "os="},
    "horoplug.compat.secret": {
        "horovod.runner.common.util.secret": "DIGEST_LENGTH SECRET_LENGTH check_digest compute_digest",
    },
    "horoplug.compat.tensorflow": {
        "horovod.tensorflow": """
            _DistributedGradientTape _SessionRunHook _allreduce_cond _get_default_graph _global_variables
            _grouped_allreduce_cond
        """,
        "horovod.tensorflow.elastic": "_global_variables",
        "horovod.tensorflow.functions": "_make_broadcast_group_fn _make_inplace_broadcast_group_fn",
        "horovod.tensorflow.gradient_aggregation": "apply_op_to_not_none_tensors get_not_none_from_list",
        "horovod.tensorflow.mpi_ops": """
            _allgather_grad _allreduce _allreduce_grad _alltoall_grad _broadcast_grad _grouped_allgather_grad
            _grouped_allreduce _grouped_allreduce_grad _grouped_reducescatter _grouped_reducescatter_grad
            _normalize_name _reducescatter _reducescatter_grad
        """,
    },
    "horoplug.compat.torch": {
        "horovod.torch.mpi_ops": """
            HorovodAllgather HorovodAllreduce HorovodAlltoall HorovodBroadcast HorovodGroupedAllgather
            HorovodGroupedAllreduce HorovodGroupedReducescatter HorovodReducescatter
        """,
    },
    "horoplug.compat.util": {
        "horovod.common.exceptions": "get_version_mismatch_message",
        "horovod.torch": "_check_has_gpu",
    },
    "horoplug.common.reduce_ops": {
        "horovod.mxnet.mpi_ops": "handle_average_backwards_compatibility=resolve",
        "horovod.torch.mpi_ops": "handle_average_backwards_compatibility=resolve",
    },
    "horoplug.spark.common.store": {
        "horovod.spark.common.store": "AbstractFilesystemStore=FilesystemStore",
    },
    "horoplug.tensorflow.functions": {
        "horovod.tensorflow.functions": "BroadcastGlobalVariablesHook broadcast_global_variables",
    },
    "horoplug.tensorflow.optimizer": {
        "horovod.tensorflow": "_DistributedAdasumOptimizer _DistributedOptimizer _LegacyOptimizer",
    },
    "horoplug.tensorflow.util": {
        "horovod.tensorflow.mpi_ops": """
            _check_has_gpu=gpu_available check_num_rank_power_of_2 handle_average_backwards_compatibility
        """,
    },
    "ray.exceptions": {
        "horovod.ray.elastic": "GetTimeoutError",
        "horovod.ray.elastic_v2": "GetTimeoutError",
    },
}
"""By the module that has the equivalents: the modules of Horovod, and their names; ``name=other`` if the equivalent is
called ``other``."""

_LAUNCHER = "call horoplug.run or start horovodrun"
_LIBRARY = "it belongs to Horovod's C library, which horoplug does not have"
_NOTICES = "horoplug's launcher itself tells processes about hosts; define State.on_hosts_updated"
_SAVING = "save an estimator by its methods save() and write()"
_SET_UP = "init() and add_process_set() set process sets up"
_SPARK_JOB = "call horoplug.spark.run"

LACKING: Final[dict[tuple[str, str], str]] = {
    ("horovod.common.basics", "MPI"): "import it from mpi4py",
    ("horovod.common.process_sets", "MPI"): "import it from mpi4py",
    ("horovod.common.process_sets", "_init_process_sets _setup _temp_process_set_object"): _SET_UP,
    ("horovod.common.util", "_check_extension_lambda"): "use extension_available",
    ("horovod.mxnet", "_append_broadcast_init"): "use broadcast_parameters",
    ("horovod.mxnet.mpi_ops", "MPI_MXNET_LIB_CTYPES dll_path"): "nothing is compiled against MXNet",
    ("horovod.ray.ray_logger", "_queue _queue_set warning_raised"): "use configure and log",
    ("horovod.ray.runner", "StaticParams"): "give its values to RayExecutor",
    ("horovod.ray.utils", "_DiscoveryActor _maybe_create_workers"): "use RayExecutor",
    ("horovod.runner", "_HorovodArgs"): _LAUNCHER,
    ("horovod.runner.elastic.discovery", "HostState"): "use HostManager",
    (
        "horovod.runner.elastic.worker",
        "HostsUpdatedRequest WorkerNotificationClient WorkerNotificationService",
    ): _NOTICES,
    ("horovod.runner.launch", """
        CACHE_FOLDER CACHE_STALENESS_THRESHOLD_MINUTES SSH_ATTEMPTS SSH_CONNECT_TIMEOUT_S
        _check_all_hosts_ssh_successful _is_elastic _launch_job is_gloo_used make_check_build_action
        make_deprecated_bool_action make_nic_action make_override_action make_override_bool_action
        make_override_false_action make_override_true_action run_controller
    """): _LAUNCHER,
    ("horovod.runner.launch", "check_build"): "start horovodrun --check-build",
    ("horovod.spark.common.store", "_DBFS_PREFIX_MAPPING"): "give DBFSLocalStore the path itself",
    ("horovod.spark.keras.estimator", """
        KerasEstimatorParamsReadable KerasEstimatorParamsReader KerasEstimatorParamsWritable KerasEstimatorParamsWriter
    """): _SAVING,
    ("horovod.spark.lightning.estimator", """
        TorchEstimatorParamsReadable TorchEstimatorParamsReader TorchEstimatorParamsWritable TorchEstimatorParamsWriter
        _torch_param_serialize
    """): _SAVING,
    ("horovod.spark.runner", """
        MINIMUM_COMMAND_LIFETIME_S WAIT_FOR_COMMAND_START_DELAY_SECONDS WAIT_FOR_SHUTDOWN_DELAY_SECONDS
        _get_indices_in_rank_order _launch_job _make_mapper _make_spark_thread _notify_and_register_task_addresses
        _register_task_addresses _task_fn
    """): _SPARK_JOB,
    ("horovod.spark.task", "_parent_process_monitor task_exec"): _SPARK_JOB,
    ("horovod.spark.torch.estimator", """
        TorchEstimatorParamsReadable TorchEstimatorParamsReader TorchEstimatorParamsWritable TorchEstimatorParamsWriter
        _torch_param_serialize
    """): _SAVING,
    (
        "horovod.tensorflow.elastic",
        "_broadcast_model _default_session _model_built",
    ): "use TensorFlowKerasState and TensorFlowState",
    ("horovod.tensorflow", "device_compatibility_check"): "it is for TensorFlow 2.2",
    ("horovod.tensorflow.elastic", "_reset"): "call shutdown() and init()",
    ("horovod.tensorflow.mpi_ops", "MPI_LIB _load_library"): _LIBRARY,
    ("horovod.torch.elastic", "_reset"): "call shutdown() and init()",
    (
        "horovod.torch.elastic.state",
        "_get_handler _get_handlers _union",
    ): "use get_handler_registry and set_handler_registry",
    ("horovod.torch.mpi_ops", """
        _allgather_function_factory _allreduce_function_factory _alltoall_function_factory _broadcast_function_factory
        _check_function _grouped_allgather_function_factory _grouped_allreduce_function_factory
        _grouped_reducescatter_function_factory _reducescatter_function_factory
    """): _LIBRARY,
    ("horovod.torch.mpi_ops", """
        _allgather_async _allreduce_async _alltoall_async _broadcast_async _grouped_allgather_async
        _grouped_allreduce_async _grouped_reducescatter_async _reducescatter_async
    """): "use the function of this name without the leading underscore",
    ("horovod.torch.mpi_ops", "_handle_map"): "a handle keeps its tensors; use poll and synchronize",
    ("horovod.torch.sync_batch_norm", "_SYNC_BN_V2 _SYNC_BN_V3 _SYNC_BN_V4 _SyncBatchNorm"): "use SyncBatchNorm",
}  # fmt: skip
"""What to use instead, by module of Horovod and its names."""
