"""The names in the modules of Horovod 0.28.1 that horoplug has. Written by
scripts/horovod_names.py; do not edit.

``OWN``: the names that a module defines. ``IMPORTED``: those that it imports from other modules of Horovod, by module;
``name=original`` if it imports ``original`` as ``name``, and ``name=`` if ``name`` is a module."""

from typing import Final

from horoplug.compat.names import table

OWN: Final = table("""
horovod: __version__
horovod.common.basics: HorovodBasics MPI
horovod.common.elastic: ObjectState State notification_manager run_fn
horovod.common.exceptions: HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt
  get_version_mismatch_message
horovod.common.process_sets: HorovodBasics MPI ProcessSet _basics _init_process_sets _setup _temp_process_set_object
  add_process_set global_process_set remove_process_set
horovod.common.util: EXTENSIONS _cache _check_extension_lambda ccl_built check_extension check_installed_version
  ddl_built env extension_available get_average_backwards_compatibility_fun get_ext_suffix get_extension_full_path
  gloo_built gpu_available is_iterable is_version_greater_equal_than mpi_built nccl_built num_rank_is_power_2
  split_list
horovod.keras: DistributedOptimizer PartialDistributedOptimizer allgather allreduce broadcast
  broadcast_global_variables load_model reducescatter
horovod.keras.callbacks: BestModelCheckpoint BroadcastGlobalVariablesCallback LearningRateScheduleCallback
  LearningRateWarmupCallback MetricAverageCallback
horovod.keras.elastic: CommitStateCallback KerasState UpdateBatchStateCallback UpdateEpochStateCallback
horovod.mxnet: DistributedOptimizer DistributedTrainer _append_broadcast_init broadcast_parameters
horovod.mxnet.compression: Compression Compressor FP16Compressor NoneCompressor
horovod.mxnet.functions: allgather_object broadcast_object
horovod.mxnet.mpi_ops: Adasum Average MPI_MXNET_LIB_CTYPES Max Min Product Sum _basics allgather allreduce allreduce_
  alltoall broadcast broadcast_ ccl_built cross_rank cross_size cuda_built ddl_built dll_path gloo_built gloo_enabled
  grouped_allgather grouped_allreduce grouped_allreduce_ grouped_reducescatter handle_average_backwards_compatibility
  init is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank reducescatter
  rocm_built shutdown size start_timeline stop_timeline
horovod.ray.elastic: ElasticRayExecutor GetTimeoutError RayHostDiscovery TestDiscovery logger
horovod.ray.elastic_v2: ElasticAdapter ElasticParams GetTimeoutError RayHostDiscovery TestDiscovery logger
horovod.ray.ray_logger: _queue _queue_set configure log warning_raised
horovod.ray.runner: Coordinator MiniSettings RayExecutor StaticAdapter StaticParams logger
horovod.ray.utils: _DiscoveryActor _maybe_create_workers detect_nics map_blocking nics_to_env_var
horovod.ray.worker: BaseHorovodWorker
horovod.runner: _HorovodArgs run
horovod.runner.common.util.env: IGNORE_REGEXES KUBEFLOW_MPI_EXEC LOG_LEVEL_STR get_env_rank_and_size is_exportable
  is_kubeflow_mpi
horovod.runner.common.util.secret: DIGEST_LENGTH HOROVOD_SECRET_KEY SECRET_LENGTH check_digest compute_digest
  make_secret_key
horovod.runner.common.util.timeout: Timeout TimeoutException
horovod.runner.elastic.constants: RESET_LIMIT_EXCEEDED_MESSAGE
horovod.runner.elastic.discovery: DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS
  DiscoveredHosts FixedHosts HostDiscovery HostDiscoveryScript HostManager HostState
horovod.runner.elastic.worker: HOROVOD_GLOO_IFACE HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT
  HOROVOD_HOSTNAME HOROVOD_LOCAL_RANK HostUpdateResult HostsUpdatedRequest WorkerNotificationClient
  WorkerNotificationManager WorkerNotificationService
horovod.runner.launch: CACHE_FOLDER CACHE_STALENESS_THRESHOLD_MINUTES SSH_ATTEMPTS SSH_CONNECT_TIMEOUT_S
  _check_all_hosts_ssh_successful _is_elastic _launch_job _run _run_elastic _run_static check_build is_gloo_used
  make_check_build_action make_deprecated_bool_action make_nic_action make_override_action make_override_bool_action
  make_override_false_action make_override_true_action parse_args run_commandline run_controller
horovod.runner.util.threads: execute_function_multithreaded in_thread on_event
horovod.spark.common.backend: Backend SparkBackend default_num_proc
horovod.spark.common.estimator: HorovodEstimator HorovodModel
horovod.spark.common.params: EstimatorParams ModelParams
horovod.spark.common.store: AbstractFilesystemStore DBFSLocalStore FilesystemStore HDFSStore LocalStore Store
  _DBFS_PREFIX_MAPPING
horovod.spark.conf: SPARK_CONF_ALWAYS_RESTART_FAILED_TASK SPARK_CONF_BLACKLIST_DISABLED SPARK_CONF_BLACKLIST_ENABLED
  SPARK_CONF_DEFAULT_VALUES SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR
  SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP SPARK_CONF_DONT_REUSE_FAILING_NODE
  SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK SPARK_CONF_MAX_INT
  SPARK_CONF_MAX_INT_MINUS_ONE SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK
  SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK SPARK_CONF_REUSE_FAILED_EXECUTOR SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP
  SPARK_CONF_REUSE_FAILING_NODE SPARK_CONF_REUSE_FAILING_NODE_IN_APP SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK
  SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK
horovod.spark.keras.estimator: KerasEstimator KerasEstimatorParamsReadable KerasEstimatorParamsReader
  KerasEstimatorParamsWritable KerasEstimatorParamsWriter KerasModel
horovod.spark.lightning.estimator: MIN_PL_VERSION TorchEstimator TorchEstimatorParamsReadable
  TorchEstimatorParamsReader TorchEstimatorParamsWritable TorchEstimatorParamsWriter TorchModel _torch_param_serialize
horovod.spark.runner: MINIMUM_COMMAND_LIFETIME_S WAIT_FOR_COMMAND_START_DELAY_SECONDS WAIT_FOR_SHUTDOWN_DELAY_SECONDS
  _get_indices_in_rank_order _launch_job _make_mapper _make_spark_thread _notify_and_register_task_addresses
  _register_task_addresses _task_fn os run run_elastic
horovod.spark.task: _parent_process_monitor task_exec
horovod.spark.torch.estimator: TorchEstimator TorchEstimatorParamsReadable TorchEstimatorParamsReader
  TorchEstimatorParamsWritable TorchEstimatorParamsWriter TorchModel _torch_param_serialize
horovod.tensorflow: BroadcastGlobalVariablesHook DistributedGradientTape DistributedOptimizer
  PartialDistributedGradientTape _DistributedAdasumOptimizer _DistributedGradientTape _DistributedOptimizer _IS_TF2
  _LegacyOptimizer _SessionRunHook _allreduce_cond _get_default_graph _global_variables _grouped_allreduce_cond
  _make_allreduce_grads_fn _make_cached_allreduce_grads_fn allreduce broadcast_global_variables
  device_compatibility_check grouped_allreduce grouped_reducescatter reducescatter
horovod.tensorflow.compression: Compression Compressor FP16Compressor NoneCompressor
horovod.tensorflow.elastic: TensorFlowKerasState TensorFlowState _IS_TF2 _broadcast_model _default_session
  _global_variables _model_built _reset run
horovod.tensorflow.functions: _make_broadcast_group_fn _make_inplace_broadcast_group_fn allgather_object
  broadcast_object broadcast_object_fn broadcast_variables
horovod.tensorflow.gradient_aggregation: LocalGradientAggregationHelper _IS_TF2 apply_op_to_not_none_tensors
  get_not_none_from_list
horovod.tensorflow.gradient_aggregation_eager: LocalGradientAggregationHelperEager _IS_TF2 _POST_TF_2_4_0
horovod.tensorflow.keras: DistributedOptimizer allgather allreduce broadcast broadcast_global_variables load_model
  reducescatter
horovod.tensorflow.keras.callbacks: BestModelCheckpoint BroadcastGlobalVariablesCallback LearningRateScheduleCallback
  LearningRateWarmupCallback MetricAverageCallback
horovod.tensorflow.keras.elastic: CommitStateCallback KerasState UpdateBatchStateCallback UpdateEpochStateCallback
horovod.tensorflow.mpi_ops: Adasum Average MPI_LIB Max Min Product Sum _allgather_grad _allreduce _allreduce_grad
  _alltoall_grad _basics _broadcast_grad _check_has_gpu _grouped_allgather_grad _grouped_allreduce
  _grouped_allreduce_grad _grouped_reducescatter _grouped_reducescatter_grad _load_library _normalize_name
  _reducescatter _reducescatter_grad allgather alltoall broadcast broadcast_ ccl_built check_num_rank_power_of_2
  cross_rank cross_size cuda_built ddl_built gloo_built gloo_enabled grouped_allgather
  handle_average_backwards_compatibility init is_homogeneous is_initialized join local_rank local_rank_op local_size
  local_size_op mpi_built mpi_enabled mpi_threads_supported nccl_built process_set_included_op rank rank_op rocm_built
  shutdown size size_op start_timeline stop_timeline
horovod.tensorflow.sync_batch_norm: SyncBatchNormalization
horovod.tensorflow.util: _cache _executing_eagerly _make_subgraph refs_to_vars vars_to_refs
horovod.torch: _MPI_LIB_AVAILABLE _check_has_gpu
horovod.torch.compression: Compression Compressor FP16Compressor NoneCompressor
horovod.torch.elastic: _reset run
horovod.torch.elastic.sampler: ElasticSampler
horovod.torch.elastic.state: ModelStateHandler OptimizerStateHandler SamplerStateHandler StateHandler TorchState
  _get_handler _get_handlers _handler_registry _union get_handler_registry set_handler_registry
horovod.torch.functions: allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
horovod.torch.mpi_ops: Adasum Average HorovodAllgather HorovodAllreduce HorovodAlltoall HorovodBroadcast
  HorovodGroupedAllgather HorovodGroupedAllreduce HorovodGroupedReducescatter HorovodReducescatter Max Min Product Sum
  _NULL _allgather_async _allgather_function_factory _allreduce_async _allreduce_function_factory _alltoall_async
  _alltoall_function_factory _basics _broadcast_async _broadcast_function_factory _check_function
  _grouped_allgather_async _grouped_allgather_function_factory _grouped_allreduce_async
  _grouped_allreduce_function_factory _grouped_reducescatter_async _grouped_reducescatter_function_factory _handle_map
  _reducescatter_async _reducescatter_function_factory allgather allgather_async allreduce allreduce_ allreduce_async
  allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ ccl_built
  cross_rank cross_size cuda_built ddl_built gloo_built gloo_enabled grouped_allgather grouped_allgather_async
  grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
  grouped_reducescatter_async handle_average_backwards_compatibility init is_homogeneous is_initialized join local_rank
  local_size mpi_built mpi_enabled mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async
  rocm_built shutdown size sparse_allreduce_async start_timeline stop_timeline synchronize
horovod.torch.optimizer: DistributedOptimizer _DistributedAdasumOptimizer _DistributedOptimizer
horovod.torch.sync_batch_norm: SyncBatchNorm _SYNC_BN_V2 _SYNC_BN_V3 _SYNC_BN_V4 _SyncBatchNorm torch
""")

_IMPORTED: Final = table("""
horovod horovod.runner: run
horovod.common.basics horovod.common.process_sets: ProcessSet _init_process_sets global_process_set
horovod.common.basics horovod.common.util: util=
horovod.common.elastic horovod.common.exceptions: HorovodInternalError HostsUpdatedInterrupt
horovod.common.elastic horovod.runner.elastic.worker: HostUpdateResult WorkerNotificationManager
horovod.common.process_sets horovod.common.util: is_iterable
horovod.common.util horovod.common.exceptions: HorovodVersionMismatchError get_version_mismatch_message
horovod.keras horovod._keras: _impl=
horovod.keras horovod.keras.callbacks: callbacks=
horovod.keras horovod.keras.elastic: elastic=
horovod.keras horovod.tensorflow: Adasum Average Sum ccl_built cross_rank cross_size cuda_built ddl_built gloo_built
  gloo_enabled init is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank
  rocm_built shutdown size start_timeline stop_timeline
horovod.keras horovod.tensorflow.compression: Compression
horovod.keras horovod.tensorflow.mpi_ops: global_process_set
horovod.keras.callbacks horovod._keras.callbacks: _impl=
horovod.keras.elastic horovod._keras.elastic: _impl=
horovod.keras.elastic horovod.tensorflow.elastic: TensorFlowKerasState run
horovod.mxnet horovod.common.util: check_extension split_list
horovod.mxnet horovod.mxnet.compression: Compression
horovod.mxnet horovod.mxnet.functions: allgather_object broadcast_object
horovod.mxnet horovod.mxnet.mpi_ops: Adasum Average Max Min ProcessSet Product Sum add_process_set allgather allreduce
  allreduce_ alltoall broadcast broadcast_ ccl_built cross_rank cross_size cuda_built ddl_built global_process_set
  gloo_built gloo_enabled grouped_allgather grouped_allreduce grouped_allreduce_ grouped_reducescatter init
  is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank reducescatter
  remove_process_set rocm_built shutdown size start_timeline stop_timeline
horovod.mxnet.functions horovod.mxnet.mpi_ops: allgather broadcast_ rank size
horovod.mxnet.mpi_ops horovod.common.basics: _HorovodBasics=HorovodBasics
horovod.mxnet.mpi_ops horovod.common.process_sets: ProcessSet _setup_process_sets=_setup _temp_process_set_object
  add_process_set global_process_set remove_process_set
horovod.mxnet.mpi_ops horovod.common.util: check_installed_version get_average_backwards_compatibility_fun
  get_ext_suffix
horovod.ray horovod.ray.elastic: ElasticRayExecutor
horovod.ray horovod.ray.runner: RayExecutor
horovod.ray horovod.ray.worker: BaseHorovodWorker
horovod.ray.elastic horovod.ray.utils: detect_nics
horovod.ray.elastic horovod.ray.worker: BaseHorovodWorker
horovod.ray.elastic horovod.runner.common.util.secret: secret=
horovod.ray.elastic horovod.runner.common.util.timeout: timeout=
horovod.ray.elastic horovod.runner.elastic.discovery: HostDiscovery
horovod.ray.elastic horovod.runner.elastic.driver: ElasticDriver
horovod.ray.elastic horovod.runner.elastic.rendezvous: create_rendezvous_handler
horovod.ray.elastic horovod.runner.elastic.settings: ElasticSettings
horovod.ray.elastic horovod.runner.gloo_run: _get_min_start_hosts create_run_env_vars create_slot_env_vars
horovod.ray.elastic horovod.runner.http.http_server: RendezvousServer
horovod.ray.elastic_v2 horovod.ray.adapter: Adapter BaseParams
horovod.ray.elastic_v2 horovod.ray.utils: detect_nics
horovod.ray.elastic_v2 horovod.ray.worker: BaseHorovodWorker
horovod.ray.elastic_v2 horovod.runner.elastic.discovery: HostDiscovery
horovod.ray.elastic_v2 horovod.runner.elastic.driver: ElasticDriver
horovod.ray.elastic_v2 horovod.runner.elastic.rendezvous: create_rendezvous_handler
horovod.ray.elastic_v2 horovod.runner.gloo_run: _get_min_start_hosts create_run_env_vars create_slot_env_vars
horovod.ray.elastic_v2 horovod.runner.http.http_server: RendezvousServer
horovod.ray.runner horovod.ray.adapter: Adapter BaseParams
horovod.ray.runner horovod.ray.elastic_v2: ElasticParams
horovod.ray.runner horovod.ray.strategy: ColocatedStrategy PGStrategy
horovod.ray.runner horovod.ray.utils: detect_nics map_blocking nics_to_env_var
horovod.ray.runner horovod.runner.common.util.hosts: hosts=
horovod.ray.runner horovod.runner.common.util.secret: secret=
horovod.ray.runner horovod.runner.common.util.timeout: timeout=
horovod.ray.runner horovod.runner.http.http_server: RendezvousServer
horovod.ray.utils horovod.ray.driver_service: _driver_fn
horovod.ray.utils horovod.runner.driver.driver_service: driver_service=
horovod.ray.utils horovod.runner.util.network: network=
horovod.ray.worker horovod.ray.ray_logger: ray_logger=
horovod.runner.common.util.env horovod.runner.common.util.secret: secret=
horovod.runner.elastic.discovery horovod.runner.common.util.safe_shell_exec: safe_shell_exec=
horovod.runner.elastic.discovery horovod.runner.elastic.worker: HostUpdateResult
horovod.runner.elastic.worker horovod.runner.common.util.network: network=
horovod.runner.elastic.worker horovod.runner.common.util.secret: secret=
horovod.runner.elastic.worker horovod.runner.elastic.rendezvous: PUT_WORKER_ADDRESSES
horovod.runner.elastic.worker horovod.runner.http.http_client: put_data_into_kvstore
horovod.runner.launch horovod.common.util: ccl_built ddl_built extension_available gloo_built mpi_built nccl_built
horovod.runner.launch horovod.runner.common.util.config_parser: config_parser=
horovod.runner.launch horovod.runner.common.util.hosts: hosts=
horovod.runner.launch horovod.runner.common.util.safe_shell_exec: safe_shell_exec=
horovod.runner.launch horovod.runner.common.util.secret: secret=
horovod.runner.launch horovod.runner.common.util.settings: hvd_settings=
horovod.runner.launch horovod.runner.common.util.timeout: timeout=
horovod.runner.launch horovod.runner.driver.driver_service: driver_service=
horovod.runner.launch horovod.runner.elastic.discovery: discovery=
horovod.runner.launch horovod.runner.elastic.settings: elastic_settings=
horovod.runner.launch horovod.runner.gloo_run: gloo_run gloo_run_elastic
horovod.runner.launch horovod.runner.http.http_client: put_data_into_kvstore read_data_from_kvstore
horovod.runner.launch horovod.runner.http.http_server: KVStoreServer
horovod.runner.launch horovod.runner.js_run: is_jsrun_installed js_run
horovod.runner.launch horovod.runner.mpi_run: mpi_run
horovod.runner.launch horovod.runner.util.cache: cache=
horovod.runner.launch horovod.runner.util.lsf: lsf=
horovod.runner.launch horovod.runner.util.network: network=
horovod.runner.launch horovod.runner.util.remote: get_remote_command
horovod.runner.launch horovod.runner.util.threads: threads=
horovod.spark horovod.spark.runner: run run_elastic
horovod.spark.common.estimator horovod.spark.common.backend: SparkBackend
horovod.spark.common.estimator horovod.spark.common.params: EstimatorParams ModelParams
horovod.spark.common.estimator horovod.spark.common.util: util=
horovod.spark.common.params horovod.spark.common.util: util=
horovod.spark.common.store horovod.spark.common.util: host_hash is_databricks
horovod.spark.keras horovod.spark.keras.estimator: KerasEstimator KerasModel
horovod.spark.keras.estimator horovod.runner.common.util.codec: codec=
horovod.spark.keras.estimator horovod.spark.common.estimator: HorovodEstimator HorovodModel
horovod.spark.keras.estimator horovod.spark.common.params: EstimatorParams
horovod.spark.keras.estimator horovod.spark.common.serialization: HorovodParamsReader HorovodParamsWriter
horovod.spark.keras.estimator horovod.spark.common.util: util=
horovod.spark.keras.estimator horovod.spark.keras.datamodule: PetastormDataModule
horovod.spark.keras.estimator horovod.spark.keras.remote: remote=
horovod.spark.keras.estimator horovod.spark.keras.util: TFKerasUtil
horovod.spark.lightning horovod.spark.lightning.estimator: TorchEstimator TorchModel
horovod.spark.lightning.estimator horovod.runner.common.util.codec: codec=
horovod.spark.lightning.estimator horovod.spark.common.estimator: HorovodEstimator HorovodModel
horovod.spark.lightning.estimator horovod.spark.common.params: EstimatorParams
horovod.spark.lightning.estimator horovod.spark.common.serialization: HorovodParamsReader HorovodParamsWriter
horovod.spark.lightning.estimator horovod.spark.common.util: util=
horovod.spark.lightning.estimator horovod.spark.lightning.legacy: to_lightning_module
horovod.spark.lightning.estimator horovod.spark.lightning.remote: remote=
horovod.spark.lightning.estimator horovod.spark.lightning.util: deserialize_fn save_into_bio serialize_fn
horovod.spark.runner horovod.common.util: gloo_built
horovod.spark.runner horovod.runner.common.util.secret: secret=
horovod.spark.runner horovod.runner.common.util.settings: hvd_settings=
horovod.spark.runner horovod.runner.common.util.timeout: timeout=
horovod.spark.runner horovod.runner.elastic.settings: hvd_elastic_settings=
horovod.spark.runner horovod.runner.launch: is_gloo_used run_controller
horovod.spark.runner horovod.runner.util.threads: in_thread
horovod.spark.runner horovod.spark.common.util: host_hash
horovod.spark.runner horovod.spark.driver.driver_service: driver_service=
horovod.spark.runner horovod.spark.driver.host_discovery: host_discovery=
horovod.spark.runner horovod.spark.driver.job_id: job_id=
horovod.spark.runner horovod.spark.gloo_run: gloo_run gloo_run_elastic
horovod.spark.runner horovod.spark.mpi_run: mpi_run
horovod.spark.runner horovod.spark.task.task_service: task_service=
horovod.spark.task horovod.runner.common.util.codec: codec=
horovod.spark.task horovod.runner.common.util.secret: secret=
horovod.spark.task horovod.runner.util.threads: in_thread
horovod.spark.task horovod.spark.driver.driver_service: driver_service=
horovod.spark.task horovod.spark.task.task_info: get_available_devices task_info=
horovod.spark.task horovod.spark.task.task_service: task_service=
horovod.spark.torch horovod.spark.torch.estimator: TorchEstimator TorchModel
horovod.spark.torch.estimator horovod.runner.common.util.codec: codec=
horovod.spark.torch.estimator horovod.spark.common.estimator: HorovodEstimator HorovodModel
horovod.spark.torch.estimator horovod.spark.common.params: EstimatorParams
horovod.spark.torch.estimator horovod.spark.common.serialization: HorovodParamsReader HorovodParamsWriter
horovod.spark.torch.estimator horovod.spark.common.util: util=
horovod.spark.torch.estimator horovod.spark.torch.datamodule: PetastormDataModule
horovod.spark.torch.estimator horovod.spark.torch.remote: remote=
horovod.spark.torch.estimator horovod.spark.torch.util: deserialize_fn save_into_bio serialize_fn
horovod.tensorflow horovod.common.util: check_extension gpu_available split_list
horovod.tensorflow horovod.tensorflow.compression: Compression
horovod.tensorflow horovod.tensorflow.elastic: elastic=
horovod.tensorflow horovod.tensorflow.functions: allgather_object broadcast_object broadcast_object_fn
  broadcast_variables
horovod.tensorflow horovod.tensorflow.gradient_aggregation: LocalGradientAggregationHelper
horovod.tensorflow horovod.tensorflow.mpi_ops: Adasum Average Max Min ProcessSet Product Sum _allreduce
  _grouped_allreduce _grouped_reducescatter _reducescatter add_process_set allgather alltoall broadcast broadcast_
  ccl_built check_num_rank_power_of_2 cross_rank cross_size cuda_built ddl_built global_process_set gloo_built
  gloo_enabled grouped_allgather handle_average_backwards_compatibility init is_homogeneous is_initialized join
  local_rank local_rank_op local_size local_size_op mpi_built mpi_enabled mpi_threads_supported nccl_built
  process_set_included_op rank rank_op remove_process_set rocm_built shutdown size size_op start_timeline stop_timeline
horovod.tensorflow horovod.tensorflow.sync_batch_norm: SyncBatchNormalization
horovod.tensorflow horovod.tensorflow.util: _cache _executing_eagerly _make_subgraph refs_to_vars vars_to_refs
horovod.tensorflow.elastic horovod.common.elastic: ObjectState run_fn
horovod.tensorflow.elastic horovod.common.exceptions: HorovodInternalError
horovod.tensorflow.elastic horovod.tensorflow.functions: broadcast_object broadcast_object_fn broadcast_variables
horovod.tensorflow.elastic horovod.tensorflow.mpi_ops: _executing_eagerly init rank shutdown
horovod.tensorflow.functions horovod.common.process_sets: ProcessSet global_process_set
horovod.tensorflow.functions horovod.tensorflow.mpi_ops: allgather broadcast broadcast_ rank size
horovod.tensorflow.functions horovod.tensorflow.util: _cache _executing_eagerly _make_subgraph
horovod.tensorflow.gradient_aggregation horovod.tensorflow.mpi_ops: global_process_set size_op
horovod.tensorflow.gradient_aggregation_eager horovod.tensorflow.mpi_ops: global_process_set size_op
horovod.tensorflow.keras horovod._keras: _impl=
horovod.tensorflow.keras horovod.common.util: is_version_greater_equal_than
horovod.tensorflow.keras horovod.tensorflow: Average Sum ccl_built cross_rank cross_size cuda_built ddl_built
  gloo_built gloo_enabled init is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported
  nccl_built rank rocm_built shutdown size start_timeline stop_timeline
horovod.tensorflow.keras horovod.tensorflow.compression: Compression
horovod.tensorflow.keras horovod.tensorflow.keras.callbacks: callbacks=
horovod.tensorflow.keras horovod.tensorflow.keras.elastic: elastic=
horovod.tensorflow.keras horovod.tensorflow.mpi_ops: ProcessSet add_process_set global_process_set remove_process_set
horovod.tensorflow.keras.callbacks horovod._keras.callbacks: _impl=
horovod.tensorflow.keras.callbacks horovod.common.util: is_version_greater_equal_than
horovod.tensorflow.keras.elastic horovod._keras.elastic: _impl=
horovod.tensorflow.keras.elastic horovod.tensorflow.elastic: TensorFlowKerasState run
horovod.tensorflow.mpi_ops horovod.common.basics: _HorovodBasics=HorovodBasics
horovod.tensorflow.mpi_ops horovod.common.process_sets: ProcessSet _setup_process_sets=_setup _temp_process_set_object
  add_process_set global_process_set remove_process_set
horovod.tensorflow.mpi_ops horovod.common.util: check_installed_version get_average_backwards_compatibility_fun
  get_ext_suffix gpu_available num_rank_is_power_2
horovod.tensorflow.mpi_ops horovod.tensorflow.util: _executing_eagerly
horovod.tensorflow.sync_batch_norm horovod.tensorflow.mpi_ops: Sum _allreduce rank size
horovod.torch horovod.common.util: check_extension
horovod.torch horovod.torch.compression: Compression
horovod.torch horovod.torch.elastic: elastic=
horovod.torch horovod.torch.functions: allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
horovod.torch horovod.torch.mpi_ops: Adasum Average HorovodInternalError Max Min ProcessSet Product Sum add_process_set
  allgather allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier
  broadcast broadcast_ broadcast_async broadcast_async_ ccl_built cross_rank cross_size cuda_built ddl_built
  global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
  grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async
  init is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built poll rank
  reducescatter reducescatter_async remove_process_set rocm_built shutdown size sparse_allreduce_async start_timeline
  stop_timeline synchronize
horovod.torch horovod.torch.optimizer: DistributedOptimizer
horovod.torch horovod.torch.sync_batch_norm: SyncBatchNorm
horovod.torch.elastic horovod.common.elastic: run_fn
horovod.torch.elastic horovod.torch.elastic.sampler: ElasticSampler
horovod.torch.elastic horovod.torch.elastic.state: TorchState
horovod.torch.elastic horovod.torch.mpi_ops: init shutdown
horovod.torch.elastic.sampler horovod.torch.mpi_ops: rank size
horovod.torch.elastic.state horovod.common.elastic: ObjectState
horovod.torch.elastic.state horovod.torch.elastic.sampler: ElasticSampler
horovod.torch.elastic.state horovod.torch.functions: allgather_object broadcast_object broadcast_optimizer_state
  broadcast_parameters
horovod.torch.elastic.state horovod.torch.mpi_ops: rank
horovod.torch.functions horovod.torch.mpi_ops: ProcessSet allgather broadcast_ broadcast_async_ global_process_set rank
  size synchronize
horovod.torch.mpi_ops horovod.common.basics: _HorovodBasics=HorovodBasics
horovod.torch.mpi_ops horovod.common.exceptions: HorovodInternalError
horovod.torch.mpi_ops horovod.common.process_sets: ProcessSet _setup_process_sets=_setup add_process_set
  global_process_set remove_process_set
horovod.torch.mpi_ops horovod.common.util: check_installed_version get_average_backwards_compatibility_fun
  gpu_available num_rank_is_power_2
horovod.torch.mpi_ops horovod.torch: mpi_lib=mpi_lib_v2
horovod.torch.mpi_ops horovod.torch.compression: Compression
horovod.torch.optimizer horovod.common.util: split_list
horovod.torch.optimizer horovod.torch.compression: Compression
horovod.torch.optimizer horovod.torch.functions: broadcast_object
horovod.torch.optimizer horovod.torch.mpi_ops: Adasum Average ProcessSet Sum allreduce_async_ global_process_set
  grouped_allreduce_async_ rocm_built size sparse_allreduce_async synchronize
horovod.torch.sync_batch_norm horovod.torch.mpi_ops: Sum allgather_async allreduce_async size synchronize
""")

IMPORTED: Final[dict[str, dict[str, str]]] = {}
for _key, _names in _IMPORTED.items():
    _module, _origin = _key.split()
    IMPORTED.setdefault(_module, {})[_origin] = _names
