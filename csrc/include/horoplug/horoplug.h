/* The C ABI of the horoplug core: the only interface between the engine and the language bindings.
 *
 * Rules of this file:
 *   - plain C, no C++ types, no framework types; every struct starts with its own size, so that a
 * caller built against an older header keeps working: fields are only ever appended, and a field
 * beyond the caller's struct_size counts as zero, or has its default in hp_settings;
 *   - every function returns an hp_status; the text that belongs to the last failure on the calling
 * thread is hp_last_error();
 *   - an engine is an object. There is no process-wide state behind this header.
 *
 * Threads: hp_submit, hp_perform, hp_prepare, hp_start, hp_start_and_wait, hp_poll, hp_wait,
 * hp_on_done, hp_result, hp_release and hp_timeline_* may be called from any thread at any time
 * between hp_engine_create and hp_engine_destroy. The log function may be called from several
 * threads at once. hp_engine_destroy must not race with another call on the same engine.
 */
#ifndef HOROPLUG_HOROPLUG_H_
#define HOROPLUG_HOROPLUG_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define HP_API __attribute__((visibility("default")))
#else
#define HP_API
#endif

/* Bumped when an existing field or function changes its meaning; appending does not bump it. */
#define HP_ABI_VERSION 3

typedef enum hp_status {
  HP_OK = 0,
  HP_IN_PROGRESS = 1,      /* hp_wait: the timeout passed first */
  HP_INVALID_ARGUMENT = 2, /* an error of the caller, detected locally: nothing was sent */
  HP_DUPLICATE_NAME = 3,   /* an operation with this name is still in flight on this rank */
  HP_UNSUPPORTED = 4, /* this combination of operation, dtype and device has no implementation */
  HP_MISMATCH =
      5, /* ranks disagree about an operation; every rank gets this, the engine stays usable */
  HP_DEADLOCK =
      6, /* every rank waits for another one; every rank gets this, the engine stays usable */
  HP_TIMEOUT = 7,          /* a deadline passed; the engine is aborted */
  HP_ABORTED = 8,          /* a rank died, a link broke or a peer aborted; the engine is aborted */
  HP_SHUT_DOWN = 9,        /* this rank or a peer has shut down in good order */
  HP_INTERNAL = 10,        /* a defect of horoplug; the engine is aborted */
  HP_LAYOUT_MISMATCH = 11, /* HP_MISMATCH, because the tensors' layouts differ (hp_submission)  */
  HP_STATUS_COUNT
} hp_status;

/* HP_UINT8, HP_FLOAT32, ...: the rows of dtypes.def. */
typedef enum hp_dtype {
#define HP_DTYPE(code, NAME, ...) HP_##NAME = code,
#include "horoplug/dtypes.def"
  HP_DTYPE_COUNT
} hp_dtype;

/* Values are Horovod's. Adasum: allreduce of floating types on 2^n ranks only. */
typedef enum hp_reduce_op {
  HP_AVERAGE = 0,
  HP_SUM = 1,
  HP_ADASUM = 2,
  HP_MIN = 3,
  HP_MAX = 4,
  HP_PRODUCT = 5,
  HP_REDUCE_OP_COUNT = 6
} hp_reduce_op;

/* HP_ALLREDUCE, HP_ALLGATHER, ...: the rows of operations.def. */
typedef enum hp_op {
#define HP_OPERATION(code, NAME, ...) HP_##NAME = code,
#include "horoplug/operations.def"
  HP_OP_COUNT
} hp_op;

typedef struct hp_engine hp_engine;
typedef struct hp_buffer hp_buffer;
typedef int64_t hp_handle; /* > 0; never reused by the same engine */

/* The connections of this process to one other rank. The caller has connected and authenticated
 * every file descriptor; the engine takes ownership of all of them, also when hp_engine_create
 * fails. -1: absent. */
typedef struct hp_peer {
  uint64_t struct_size;
  int32_t rank;
  int32_t host; /* index of the peer's host; equal numbers share memory */
  int32_t
      stream_fd; /* connected TCP or Unix stream socket; carries control and, between hosts, data */
  int32_t segment_fd;  /* the peer's memfd, when it is on this host */
  int32_t doorbell_fd; /* the peer's eventfd, when it is on this host */
  int32_t lane_count;  /* further connections to the peer, over which data is spread as well; the
                          same number on both sides, in the same order */
  const int32_t* lane_fds;
  const uint8_t* keys; /* NULL: the connections are not encrypted. Otherwise, for stream_fd and for
                          each lane: the key of what is sent and that of what is received, of
                          HP_KEY_BYTES each. No key may be used twice. Read by hp_engine_create
                          only */
} hp_peer;

#define HP_KEY_BYTES 32

/* OpenSSL's libcrypto, 1.1.1 or newer, which this process has loaded: addresses of its functions.
 * They stay valid until the engine is destroyed. */
typedef struct hp_libcrypto {
  uint64_t struct_size;
  void* cipher_ctx_new; /* EVP_CIPHER_CTX_new */
  void* cipher_ctx_free;
  void* cipher_ctx_ctrl;
  void* cipher_init_ex; /* EVP_CipherInit_ex */
  void* cipher_update;
  void* cipher_final_ex;
  void* aes_256_gcm; /* EVP_aes_256_gcm */
  void* sha256;      /* EVP_sha256 */
  void* hmac;        /* HMAC */
} hp_libcrypto;

/* A thread that runs posted functions one after the other, for a library that requires all its
 * calls on one thread. */
typedef struct hp_worker hp_worker;

typedef enum hp_mpi_on_gpu {
  HP_MPI_ON_GPU_NOTHING = 0,
  HP_MPI_ON_GPU_MOVES = 1, /* the collectives that only move data */
  HP_MPI_ON_GPU_ALL = 2    /* and those that reduce */
} hp_mpi_on_gpu;

/* The time that a collective takes: that of an empty one, and that of each further byte. */
typedef struct hp_mpi_cost {
  double latency;   /* seconds */
  double byte_time; /* seconds per byte */
} hp_mpi_cost;

/* An MPI library that this process has initialised: addresses of its functions, and the values of
 * its handles as integers. Handles that are pointers (Open MPI, the
 * standard ABI) have handle_bytes = sizeof(void*); those that are ints (MPICH, Intel MPI)
 * sizeof(int). Functions and handles stay valid until the engine is destroyed, or MPI finalized.
 *
 * Without a worker, one thread of the engine calls MPI at a time, but not always the same thread:
 * this requires MPI_THREAD_MULTIPLE. With a worker, the worker's thread makes all calls. Then
 * MPI_THREAD_FUNNELED suffices if that thread has initialised MPI, and MPI_THREAD_SERIALIZED if the
 * program itself does not call MPI. (Any thread may call MPI_Finalized and MPI_Error_string at any
 * level.) Only the engine uses the communicator, which must return errors (MPI_ERRORS_RETURN). */
typedef struct hp_mpi {
  uint64_t struct_size;
  int32_t handle_bytes;
  int32_t on_gpu;         /* the collectives that accept memory of NVIDIA GPUs: an hp_mpi_on_gpu */
  uint64_t communicator;  /* contains all ranks of the job in rank order */
  uint64_t byte;          /* MPI_BYTE */
  void* in_place;         /* MPI_IN_PLACE */
  const uint64_t* dtypes; /* MPI's types by hp_dtype, for MPI's own reductions; 0, or beyond
                             dtype_count: MPI's reductions are not used for that type */
  int32_t dtype_count;
  int32_t reduce_op_count;
  const uint64_t* reduce_ops; /* MPI's operations by hp_reduce_op, likewise */
  void* isend;                /* MPI_Isend */
  void* irecv;
  void* test;
  void* cancel;
  void* finalized;
  void* error_string;
  void* iallreduce; /* MPI's own collectives; NULL: that one is not used */
  void* ibcast;
  void* iallgatherv;
  void* ialltoallv;
  void* ireduce_scatter;
  void* ibarrier;
  const hp_mpi_cost* costs; /* of MPI's own collectives over all ranks, by hp_op; the same on all
                               ranks. Not positive, or beyond cost_count: estimated */
  int32_t cost_count;
  int32_t reserved;
  hp_worker* worker; /* NULL: none. May be freed before the engine is */
} hp_mpi;

/* The value of a setting that may be 0, 1, or neither. */
#define HP_UNSET (-1)

/* The C type of each kind of setting. All of them have 8 bytes, so that no new field can lie where
 * an older caller's struct has padding. */
typedef int64_t hp_setting_Bytes;
typedef int64_t hp_setting_Count;
typedef int64_t hp_setting_Flag;
typedef int64_t hp_setting_FlagOrUnset;
typedef double hp_setting_Number;
typedef double hp_setting_Seconds;
typedef double hp_setting_NeverOrSeconds;
typedef const char* hp_setting_Text;

/* The settings of an engine: the rows of settings.def, which documents them. The caller sets
 * struct_size, calls hp_settings_init, and changes what it wants to change. Fields that an older
 * caller does not have get their defaults. All times in seconds; 0 means never. */
typedef struct hp_settings {
  uint64_t struct_size;
#define HP_SETTING(kind, name, ...) hp_setting_##kind name;
#include "horoplug/settings.def"
} hp_settings;

/* Fills in the defaults. */
HP_API void hp_settings_init(hp_settings* settings);

/* One rank of a job: its connections, and the settings. */
typedef struct hp_config {
  uint64_t struct_size;
  int32_t rank;
  int32_t size;
  int32_t host;        /* index of this process's host */
  int32_t segment_fd;  /* this process's own memfd, empty, created with MFD_ALLOW_SEALING; -1 when
                          no peer is on this host */
  int32_t doorbell_fd; /* this process's own eventfd (non-blocking); -1: the engine makes one */
  int32_t peer_count;  /* size - 1 */
  const hp_peer* peers;
  const hp_settings* settings;                              /* NULL: the defaults */
  void (*log)(void* user, int32_t level, const char* text); /* level: see hp_settings.log_level.
                                                               NULL: stderr */
  void* log_user;
  double link_latency;   /* seconds that a message between hosts takes, as measured, and */
  double link_bandwidth; /* bytes per second; the same on all ranks. Default: a guess */
  const hp_mpi* mpi;     /* carries data between hosts; NULL: the peers' connections carry it */
  const char* const* gpu_files; /* see hp_gpu_capabilities */
  int32_t gpu_file_count;
  int32_t connects_on_demand; /* 1: peers on other hosts need not be connected. Their stream_fd is
                                -1, their lane_count as for the others; lane_fds and keys are
                                not read. On all ranks or on none. Of the connected ranks, no
                                one is cut off when one rank ends; parents and children in the
                                tree of all ranks are connected */
  const hp_libcrypto* libcrypto;  /* NULL: nothing is encrypted. Otherwise everything that leaves
                                     this host is: each peer on another host has keys, and neither
                                     MPI nor NCCL carries data between hosts */
  int32_t connection_requests_fd; /* with connects_on_demand: a stream socket to which the engine
                                     writes the number of a rank, as uint32_t, when it first needs
                                     connections to it. The caller answers by hp_connection_add or
                                     hp_connection_fail. The engine owns the descriptor */
  int32_t reserved;
} hp_config;

/* The settings that can be tuned. */
typedef enum hp_tunable {
  HP_TUNE_BUCKETS = 1,   /* size of a plan's batches */
  HP_TUNE_CHUNKS = 2,    /* size of the chunks in which data is sent */
  HP_TUNE_LANES = 4,     /* number of connections between two ranks on different hosts */
  HP_TUNE_ALGORITHMS = 8 /* message sizes at which the choice of algorithm changes */
} hp_tunable;

/* One operation on one or more tensors (more than one: a group, which runs as a whole or not at
 * all).
 *
 * Every tensor is dense and in row-major order. count and rows are derived from shape: rows is
 * shape[0], a scalar counts as one row. All pointers must stay valid until the handle is done;
 * output may equal input. */
typedef struct hp_tensor {
  const void* input;
  void* output; /* NULL: the engine allocates (allgather, alltoall, reducescatter, gather, scatter)
                   and hp_result hands it out; send has none. An output for one of these, but not
                   for scatter, has room for the result if every rank gives as many rows as this
                   one; the engine allocates nevertheless if they do not */
  const int64_t* shape;
  int32_t ndim;
  int32_t reserved;
} hp_tensor;

/* In place of the source of a recv: it takes the tensor with its tag that any rank of the process
 * set offers first. */
#define HP_ANY_RANK (-1)

typedef struct hp_submission {
  uint64_t struct_size;
  int32_t op;          /* hp_op */
  int32_t dtype;       /* hp_dtype */
  int32_t reduce_op;   /* hp_reduce_op, for allreduce, reducescatter and reduce */
  int32_t root;        /* broadcast, reduce, gather, scatter: the root; send: the destination; recv:
                          the source, or HP_ANY_RANK, and hp_value then gives the source. A global
                          rank, in the process set */
  int32_t device;      /* -1: CPU; otherwise the ordinal of a CUDA device, one for each engine */
  int32_t process_set; /* 0: all ranks; otherwise the number that hp_process_set_add gave */
  double prescale;     /* 0 counts as 1 */
  double postscale;
  const char* name; /* NULL: "<op>.noname.<n>", n counted per operation kind */
  const hp_tensor* tensors;
  int32_t tensor_count;
  int32_t split_count;   /* alltoall, scatter: 0, or the size of the process set */
  const int64_t* splits; /* alltoall, and scatter on its root: rows of the input for each rank;
                            NULL: equal parts, of scatter with one row more for the first ranks */
  void* stream;          /* device >= 0: a CUstream; NULL is the default stream. The inputs are
                            ready, and the outputs writable, when the work that is in it now
                            is done */
  int32_t wire_dtype;    /* allreduce of HP_FLOAT32: HP_FLOAT16 or HP_BFLOAT16, the type in which
                            elements travel and are reduced; 0: HP_FLOAT32. Other types: ignored */
  int32_t tag;           /* send, recv: 0 or more; a recv matches sends with its tag only */
  int32_t pool_thread;   /* 1: the calling thread belongs to a pool of a framework and submits for
                            other threads. Outside of operations it does not count as a thread that
                            may submit what other ranks wait for; see hp_expect_threads */
  int32_t reserved;
  const char* layout; /* what the tensors are parts of, in words, such as "sparse float32 [3, 4]";
                         the same on all ranks. NULL or "": they are dense tensors */
} hp_submission;

/* The result of a completed operation for one of its tensors. */
typedef struct hp_tensor_result {
  uint64_t struct_size;
  void* data; /* the submission's output, or memory that the engine allocated (see hp_result) */
  int64_t bytes;
  int64_t rows;              /* first dimension of the output */
  const int64_t* row_counts; /* allgather, alltoall, gather on its root: rows that came from each
                                rank, otherwise NULL */
  int32_t row_count_size;
  int32_t
      owned; /* 1: data is the engine's allocation, freed by hp_release unless taken by hp_take */
  int32_t device; /* location of data: -1: the CPU, otherwise this CUDA device */
  int32_t reserved;
} hp_tensor_result;

typedef struct hp_stats {
  uint64_t struct_size;
  uint64_t batches;          /* fused batches run */
  uint64_t tensors;          /* tensors in them */
  uint64_t bytes;            /* payload bytes reduced or moved, counted once per rank */
  uint64_t control_messages; /* control messages sent by this rank */
  uint64_t control_bytes;
  uint64_t cached_names;    /* names that have an id now */
  uint64_t wakeups;         /* number of times the thread that runs the progress loop woke up */
  uint64_t planned_batches; /* batches that ran without negotiation */
  uint64_t broken_plans;    /* number of plans that were broken */
  uint64_t
      failed; /* 1: the engine has ended because of a failure, or because another rank has ended */
  uint64_t active_microseconds; /* time during which operations of this rank were in flight */
} hp_stats;

HP_API int32_t hp_abi_version(void);
HP_API const char* hp_version(void);

/* Text of the last failure on this thread; valid until the next call on this thread. Never NULL. */
HP_API const char* hp_last_error(void);

/* The public name of an operation of hp_op, such as "allreduce". It begins, followed by a dot, the
 * names by which operations of different ranks are paired. "unknown operation" for other numbers.
 */
HP_API const char* hp_op_name(int32_t op);

/* Bytes of one element, or 0 for an unknown dtype. */
HP_API size_t hp_dtype_size(int32_t dtype);

/* The instruction set that the CPU kernels of this process use: "avx512", "avx2" or "baseline". */
HP_API const char* hp_cpu_kernels(void);

/* One line per algorithm: "op name medium", for check-build; the text is static. */
HP_API const char* hp_algorithms(void);

/* The CUDA components that were found, for check-build: one line each for the driver and its
 * devices, NVRTC, NCCL and where the kernels come from, "[X] what (where)" or "[ ] what: why it
 * cannot be used". `files`: paths of libraries to try after those that the process has already
 * loaded and before those of the system, and the path of the kernel file of `make kernels`, which
 * replaces NVRTC. Starts CUDA in this process. The caller frees the text with hp_free. */
HP_API hp_status hp_gpu_capabilities(const char* const* files, int32_t count, char** text);

/* The version of NCCL that is found with these `files`, such as 22304; 0: none. */
HP_API int32_t hp_nccl_version(const char* const* files, int32_t count);

/* hp_worker_start starts the worker's thread. hp_worker_post queues a function, from any thread,
 * and returns at once; `function` must not throw. hp_worker_free releases the worker: its thread
 * ends once it has run the queued functions and the engines that use it are destroyed. */
HP_API hp_status hp_worker_start(hp_worker** worker);
HP_API hp_status hp_worker_post(hp_worker* worker, void (*function)(void* context), void* context);
HP_API void hp_worker_free(hp_worker* worker);

/* Starts an engine and its progress thread. Collective: returns once every peer has answered a
 * handshake that compares the configurations (HP_MISMATCH if they differ), or after data_timeout
 * (HP_TIMEOUT). */
HP_API hp_status hp_engine_create(const hp_config* config, hp_engine** engine);

/* Leaves the job in good order: peers' pending operations end with HP_SHUT_DOWN. Releases the
 * engine's threads, connections and shared memory, whatever handles remain: operations that had
 * ended keep their results, and hp_wait returns HP_SHUT_DOWN for all others. Idempotent. */
HP_API hp_status hp_engine_shutdown(hp_engine* engine);
HP_API void hp_engine_destroy(hp_engine* engine);

/* The connections to a rank that was not connected, by lane, authenticated and nonblocking; see
 * hp_config.connects_on_demand. Both ends are given to their engines, also to one that has not
 * asked for them. Takes ownership of the descriptors. `keys`: see hp_peer. */
HP_API hp_status hp_connection_add(hp_engine* engine, int32_t rank, const int32_t* fds,
                                   int32_t count, const uint8_t* keys);
/* Connections to a rank that the engine has asked for cannot be made; the job fails. `reason`
 * completes "rank 5: ". */
HP_API hp_status hp_connection_fail(hp_engine* engine, int32_t rank, const char* reason);

/* Ends the engine at once and sends the reason to every peer. All handles on all ranks end with
 * HP_ABORTED. */
HP_API hp_status hp_engine_abort(hp_engine* engine, const char* reason);

/* Changes two limits of hp_settings, for operations in flight, too. To be called on all ranks: that
 * rank whose limit passes first ends the job. Nothing happens after the end of the engine. */
HP_API hp_status hp_engine_set_limits(hp_engine* engine, double data_timeout,
                                      double operation_timeout);

HP_API hp_status hp_submit(hp_engine* engine, const hp_submission* submission, hp_handle* handle);

/* Submits `count` operations in order, at a lower cost than single calls. All structs have the
 * struct_size of the first one. The operations before the first rejected one are submitted:
 * `accepted` is their number, `handles` receives their handles, and the returned status is that of
 * the rejected one. */
HP_API hp_status hp_submit_batch(hp_engine* engine, const hp_submission* submissions, int32_t count,
                                 hp_handle* handles, int32_t* accepted);

/* Process sets. Adding and removing are operations on all ranks: every rank calls them, in the same
 * order and with the same ranks (HP_MISMATCH otherwise), also those that are not in the set. They
 * end, like other operations, with hp_wait. Operations of different sets run independently of each
 * other.
 *
 * hp_process_set_add: `ranks` are global, ascending and without repetition; hp_value gives the
 * number of the new set, which is never used again for another one.
 * hp_process_set_remove: operations on the set that not all of its ranks have submitted fail. */
HP_API hp_status hp_process_set_add(hp_engine* engine, const int32_t* ranks, int32_t count,
                                    hp_handle* handle);
HP_API hp_status hp_process_set_remove(hp_engine* engine, int32_t process_set, hp_handle* handle);

/* This rank has no more data. Until all ranks of the set have joined, it takes part in the other
 * ranks' operations without changing their results, and may not submit operations on the set.
 *   allreduce, reducescatter   the reduction's identity element; Average still divides by all ranks
 *   allgather                  no rows
 *   broadcast                  receives and discards; HP_MISMATCH if it is the root
 *   alltoall                   no rows; HP_MISMATCH if another rank has rows for it
 *   barrier                    takes part
 * Process sets cannot be added or removed meanwhile (HP_MISMATCH). The handle is done when all have
 * joined; hp_value then gives the rank that was the last to do so. */
HP_API hp_status hp_join(hp_engine* engine, int32_t process_set, hp_handle* handle);

/* Shared buffers: memory in which ranks of one host can reduce without copies. Every rank gets
 * `bytes` bytes of its own, zeroed and aligned to a page, which its peers map too; on several
 * hosts, or with a single rank, it is plain memory. An allreduce runs without packing if, on every
 * rank, its tensors lie in the same buffer at the same offsets and are their own outputs; all else
 * works as with any memory. Nothing in it is written by a peer except the results of operations
 * that this rank has submitted and that are not done.
 *
 * hp_buffer_create is an operation on all ranks, like hp_process_set_add: same sizes, same order.
 * hp_buffer_take takes the buffer out of a handle that is done, once. From then on the buffer does
 * not depend on the engine and belongs to the caller until hp_buffer_free, which releases this
 * rank's part only. It must not be called while an operation on the buffer is in flight. */
HP_API hp_status hp_buffer_create(hp_engine* engine, uint64_t bytes, hp_handle* handle);
HP_API hp_status hp_buffer_take(hp_engine* engine, hp_handle handle, hp_buffer** buffer);
HP_API void* hp_buffer_data(const hp_buffer* buffer);
HP_API uint64_t hp_buffer_size(const hp_buffer* buffer);
HP_API void hp_buffer_free(hp_buffer* buffer);

/* The number that a completed hp_process_set_add or hp_join has produced. */
HP_API hp_status hp_value(hp_engine* engine, hp_handle handle, int64_t* value);

/* HP_OK when done, HP_IN_PROGRESS when not, the operation's failure otherwise. */
HP_API hp_status hp_poll(hp_engine* engine, hp_handle handle);

/* Blocks for at most timeout seconds (negative: until done); 0 is hp_poll. Meanwhile the thread
 * runs the progress loop, unless another thread runs it: it may call the log function. It counts as
 * blocked for the deadlock detector. A caller that must look at signals calls again with the same
 * handle; the wait counts as one. */
HP_API hp_status hp_wait(hp_engine* engine, hp_handle handle, double timeout);

/* Result of tensor `index` of a handle that is done; valid until hp_release. */
HP_API hp_status hp_result(hp_engine* engine, hp_handle handle, int32_t index,
                           hp_tensor_result* result);

/* Takes the allocation of a result out of the handle; the caller frees it with hp_free. */
HP_API hp_status hp_take(hp_engine* engine, hp_handle handle, int32_t index, void** data);
HP_API void hp_free(void* data);

/* Tensors on GPUs. An operation on them is done when all of its work is enqueued on the GPU, which
 * may be long before the GPU has finished it: the CPU never waits for a GPU.
 *
 * hp_stream_wait makes later work in `stream` wait for the results of an operation that is done.
 * For operations on the CPU it does nothing. The operation uses its tensors until that point of the
 * stream, and results that the engine has allocated may be used from that point on.
 * HP_INVALID_ARGUMENT: the operation is not done, or has failed.
 *
 * hp_take_device is hp_take for GPU memory, and hp_device_allocate allocates GPU memory; both for
 * later work in `stream`. The memory does not depend on the engine any more. hp_device_memory_free
 * releases it when `stream` has finished the work that is in it at the time of the call.
 * (hp_release releases results that were not taken, in the order of the stream with which the
 * operation was submitted.)
 *
 * hp_stream_copy enqueues in `stream` a copy of result `index`, after the operation. `to`: memory
 * on the same GPU, of the size that hp_result reports. A result in the CPU's memory is copied to
 * the CPU's memory before the call returns. */
typedef struct hp_device_memory hp_device_memory;
HP_API hp_status hp_stream_wait(hp_engine* engine, hp_handle handle, void* stream);
HP_API hp_status hp_take_device(hp_engine* engine, hp_handle handle, int32_t index, void* stream,
                                hp_device_memory** memory);
HP_API hp_status hp_device_allocate(hp_engine* engine, int32_t device, uint64_t bytes, void* stream,
                                    hp_device_memory** memory);
HP_API hp_status hp_stream_copy(hp_engine* engine, hp_handle handle, int32_t index, void* to,
                                void* stream);
HP_API void* hp_device_memory_data(const hp_device_memory* memory);
HP_API void hp_device_memory_free(hp_device_memory* memory);

/* Releases a handle. A handle that is still in flight is released when its operation is done. */
HP_API hp_status hp_release(hp_engine* engine, hp_handle handle);

HP_API hp_status hp_get_stats(hp_engine* engine, hp_stats* stats);

/* Begins to write a timeline (Chrome's trace format, as Perfetto reads it) to a file, in place of
 * the current one. mark_cycles: 1 marks each round of negotiation. Rank 0 alone writes; on the
 * other ranks both calls do nothing. HP_INVALID_ARGUMENT: the file cannot be written. If the
 * file cannot be written any longer, the timeline ends with a warning. */
HP_API hp_status hp_timeline_start(hp_engine* engine, const char* path, int32_t mark_cycles);

/* Completes the timeline, if there is one. hp_engine_shutdown does so too. */
HP_API hp_status hp_timeline_stop(hp_engine* engine);

/* Calls `done` with `context` once the operation of this handle has ended, successfully or not,
 * also because the engine has ended. It is called exactly once; during this call if the operation
 * has ended already. It is called on the thread that runs the progress loop and delays the engine:
 * it must be short, must not throw, and may call no function of this engine except hp_poll,
 * hp_result, hp_take, hp_value and hp_release, for handles that are done. There can be one for each
 * handle, which the caller does not release before. HP_INVALID_ARGUMENT: there is one already, or
 * no such handle. */
typedef void (*hp_done)(void* context);
HP_API hp_status hp_on_done(hp_engine* engine, hp_handle handle, hp_done done, void* context);

/* The number of ranks of a process set, and this rank's index among them, or -1 if it is not a
 * member. Either may be NULL. */
HP_API hp_status hp_process_set_size(hp_engine* engine, int32_t process_set, int32_t* size,
                                     int32_t* place);

/* hp_submit and hp_wait in one, without waking another thread where that can be avoided. `handle`
 * is 0 if the operation was refused; otherwise it is submitted, the status is that of hp_wait, and
 * the caller releases the handle. */
HP_API hp_status hp_perform(hp_engine* engine, const hp_submission* submission, double timeout,
                            hp_handle* handle);

/* Operations that are submitted again and again. hp_prepare checks all of a submission but the
 * memory of its tensors, and keeps it, so that starting the operation neither copies nor looks up
 * its name and shapes. `input` and `output` of its tensors, `stream` and `pool_thread` do not
 * matter. A prepared operation can be started on its engine as often as wanted; under a name, one
 * start at a time like other operations of one name. hp_prepared_free releases it at any time:
 * operations in flight do not need it. */
typedef struct hp_prepared hp_prepared;
HP_API hp_status hp_prepare(hp_engine* engine, const hp_submission* submission,
                            hp_prepared** prepared);
HP_API void hp_prepared_free(hp_prepared* prepared);

/* One start of a prepared operation. */
typedef struct hp_instance {
  uint64_t struct_size;
  const hp_prepared* prepared;
  const void* const* inputs; /* by tensor; see hp_tensor */
  void* const* outputs;
  void* stream;         /* see hp_submission */
  int32_t pool_thread;  /* see hp_submission */
  int32_t keeps_handle; /* 1: hp_start_and_wait gives a handle in any case */
} hp_instance;

/* hp_submit_batch and hp_perform for prepared operations. hp_start_and_wait sets `handle` to 0 also
 * after a success on the CPU whose results are all in the outputs: there is nothing left to release
 * then.
 * HP_INVALID_ARGUMENT: the operation was prepared for another engine. */
HP_API hp_status hp_start(hp_engine* engine, const hp_instance* instances, int32_t count,
                          hp_handle* handles, int32_t* accepted);
HP_API hp_status hp_start_and_wait(hp_engine* engine, const hp_instance* instance, double timeout,
                                   hp_handle* handle);

/* Called by a thread between two slices of its wait, after hp_wait or hp_perform has returned
 * HP_IN_PROGRESS: threads of the program, by their ids in the kernel (gettid), that may submit
 * operations although they have not done so yet. The list counts while the calling thread waits.
 * A wait for less than a second is taken for a slice of a longer one: the thread itself counts as
 * one that may submit operations until it has called this in a wait for the same operation.
 *
 * A rank is in a deadlock only if all of these threads that still run, and all that have submitted
 * operations without `pool_thread`, are in hp_wait or hp_perform. Otherwise they may submit what
 * other ranks wait for, and a warning is logged in place of HP_DEADLOCK. */
HP_API hp_status hp_expect_threads(hp_engine* engine, const int64_t* ids, int32_t count);

/* Called like hp_expect_threads: threads that cannot continue before the calling thread does, such
 * as one that waits for its end. They count as blocked while the calling thread waits. The list
 * replaces the former one of this thread. */
HP_API hp_status hp_hold_threads(hp_engine* engine, const int64_t* ids, int32_t count);

/* Threads seem to wait for the operation outside of the core, for a future for example that another
 * thread completes. Called every 0.25 s or so as long as this is true; it counts for a second.
 *
 * The calling thread may be one of them, and then counts as blocked. Any other thread counts as
 * blocked only if it has slept without a break for half of hp_settings.deadlock_time, in a lock or
 * a condition variable without a time limit, while the process computed nothing: a thread that
 * computes, sleeps for a time, or waits for a file, a socket or a process, is not blocked.
 *
 * A thread that calls hp_poll for a collective operation again and again, and does nothing else,
 * waits for the operation, too. */
HP_API hp_status hp_note_wait(hp_engine* engine, hp_handle handle, const int64_t* ids,
                              int32_t count);

/* The search for deadlocks of `engine` takes in the operations of `group`, another engine of this
 * process: ranks may wait for each other in different groups. All ranks of `group` are ranks of
 * `engine`: `ranks` are their numbers there, by their rank in `group`. `name` names the group in
 * error texts; it is the same on all ranks, and `engine` has no other group of that name. Ends with
 * either of the engines. */
HP_API hp_status hp_engine_attach(hp_engine* engine, hp_engine* group, const char* name,
                                  const int32_t* ranks, int32_t count);

#ifdef __cplusplus
}
#endif

#endif /* HOROPLUG_HOROPLUG_H_ */
