"""The C core as Python sees it: a thin pybind11 layer over the C ABI (``csrc/include/horoplug/horoplug.h``)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

ABI_VERSION: int
ANY_RANK: int
"""``HP_ANY_RANK``: in place of the source of a recv."""

class Status(IntEnum):
    """``hp_status``."""

    OK = ...
    IN_PROGRESS = ...
    INVALID_ARGUMENT = ...
    DUPLICATE_NAME = ...
    UNSUPPORTED = ...
    MISMATCH = ...
    DEADLOCK = ...
    TIMEOUT = ...
    ABORTED = ...
    SHUT_DOWN = ...
    INTERNAL = ...
    LAYOUT_MISMATCH = ...

class Op(IntEnum):
    """``hp_op``."""

    ALLREDUCE = ...
    ALLGATHER = ...
    BROADCAST = ...
    ALLTOALL = ...
    REDUCESCATTER = ...
    BARRIER = ...
    JOIN = ...
    ADD_PROCESS_SET = ...
    REMOVE_PROCESS_SET = ...
    CREATE_BUFFER = ...
    REDUCE = ...
    GATHER = ...
    SCATTER = ...
    SEND = ...
    RECV = ...
    RELEASE_PROCESS_SET = ...

class ReduceOp(IntEnum):
    """``hp_reduce_op``."""

    AVERAGE = ...
    SUM = ...
    ADASUM = ...
    MIN = ...
    MAX = ...
    PRODUCT = ...

class Tunable(IntEnum):
    """``hp_tunable``."""

    BUCKETS = ...
    CHUNKS = ...
    LANES = ...
    ALGORITHMS = ...

class MpiOnGpu(IntEnum):
    """``hp_mpi_on_gpu``."""

    NOTHING = ...
    MOVES = ...
    ALL = ...

class Error(Exception):
    """A failed call. ``args`` is ``(status, message)``; ``status`` is one of :class:`Status`."""

    status: int

class Memory:
    """Memory that the core allocated for a result; freed when garbage collected. Supports the buffer protocol (writable
    bytes)."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class DeviceMemory:
    """Memory on a GPU that the core allocated. When this object is garbage collected, the memory is freed in the order
    of its stream. Its ``__cuda_array_interface__`` describes writable bytes and names no stream to wait for."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def stream(self) -> int:
        """The CUstream, which must outlive this object."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...

class Buffer:
    """This rank's part of a shared buffer; freed when garbage collected. Supports the buffer protocol (writable bytes).
    May outlive its engine."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Takes(IntEnum):
    """What the first argument of a :class:`DirectFunction` is; see csrc/bindings/python/direct_function.h."""

    NOTHING = ...
    TENSOR = ...
    GROUP = ...

class DirectOutput(IntEnum):
    """Where the result of a :class:`DirectFunction` is; see csrc/bindings/python/direct_function.h."""

    NONE = ...
    INPUT = ...
    LIKE_INPUT = ...
    SAME_ROWS = ...
    ALL_ROWS = ...
    PART_ROWS = ...
    ROOT_ROWS = ...
    CORE_ROWS = ...

class DirectCalls:
    """What all :class:`DirectFunction` of a process share."""

    def __init__(
        self, fresh: set[tuple[int, str]], operations: dict[int, Any], numbers: Iterator[int]
    ) -> None:
        """``fresh``: see ``Context.submitted``; ``operations``, ``numbers``: see ``Context.track``."""

    def use(self, engine: Engine | None) -> None:
        """The engine that runs now. None: every call goes through Python."""

class DirectFunction:
    """A public function: in the usual case (csrc/bindings/python/direct_call.cc) it performs or starts the operation
    itself, otherwise it calls ``python`` with the same arguments."""

    def __init__(
        self,
        python: Callable[..., Any],
        calls: DirectCalls,
        failed: Callable[[Error], None],
        prefix: str,
        operation: int,
        *,
        tensor_type: type | None = None,
        exchange: Any = None,
        empty_like: Callable[[Any], Any] | None = None,
        empty: Callable[[Any, tuple[int, ...]], Any] | None = None,
        collect: Callable[[Engine, int, Any, Any], Any] | None = None,
        takes: Takes = Takes.NOTHING,
        output: DirectOutput = DirectOutput.NONE,
        reductions: int = 0,
        root: str | None = None,
        has_tag: bool = False,
        blocks: bool = False,
    ) -> None:
        """``failed(error)`` raises an exception. ``prefix`` begins the names of the operations. ``operation``: see
        :class:`Op`. ``reductions``: the bits of those of usual calls. ``root``: the name of the argument that is the
        other rank. ``has_tag``: whether a tag may be given. ``blocks``: whether it waits for the operation; otherwise
        it returns a handle.

        For functions that take tensors: ``exchange``: DLPack's ``__dlpack_c_exchange_api__`` of ``tensor_type``; None:
        its tensors have the buffer protocol. ``empty_like(tensor)`` and, for an output of another shape,
        ``empty(tensor, shape)`` make outputs. ``collect(engine, handle, tensor, output)`` makes the result of memory
        that the core has allocated, or returns the output; None: the result is always in the output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class DirectGroup:
    """What the usual calls of a process group of ``torch.distributed`` need."""

    def __init__(self, engine: Engine) -> None: ...

    callback_thread: int
    """The thread, by its identifier, that calls the callbacks of futures: none of its calls is usual."""

class DirectAllreduce:
    """The method ``allreduce(tensors, opts)`` of process groups of ``torch.distributed``: in the usual case
    (csrc/bindings/python/direct_allreduce.cc) it performs the operation itself, otherwise it calls ``python`` with the
    same arguments.

    The group has an attribute ``_direct``, its :class:`DirectGroup` or None: no call is usual; a method
    ``_await_allreduce(tensor, handle, opts)``, which waits for an operation that is not done at once; and a method
    ``_fail_operation(error)``, which raises an exception."""

    def __init__(
        self,
        python: Callable[..., Any],
        tensor_type: type,
        exchange: Any,
        options_type: type,
        reductions: dict[int, int],
        is_profiled: Callable[[], bool],
        /,
    ) -> None:
        """``tensor_type``, ``exchange``: see :class:`DirectFunction`. ``options_type``: of usual calls. ``reductions``:
        those of usual calls in the core, by the hash of those of PyTorch. ``is_profiled()``: whether this thread is."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class DirectOperation:
    """What a :class:`DirectFunction` has started. It is a ``horoplug.common.in_flight.Waitable``."""

    def wait(self) -> Any: ...
    def done(self) -> bool: ...
    def waitable(self, handle: int, /) -> DirectOperation: ...
    def abandon(self) -> None: ...

class Result:
    """The result of a finished operation for one of its tensors."""

    @property
    def rows(self) -> int:
        """First dimension of the output."""

    @property
    def row_counts(self) -> list[int]:
        """Rows received from each rank (allgather, alltoall); empty for other operations."""

    @property
    def memory(self) -> Memory | DeviceMemory | None:
        """The output, if the core allocated it (submitted with output address 0), on the device of the input."""

class Worker:
    """A thread that calls functions one after the other. It ends when this object is garbage collected, all posted
    functions have been called, and no engine uses the thread."""

    def __init__(self) -> None: ...
    def post(self, function: Callable[[], object]) -> None:
        """Call a function in the thread. An exception that it raises is reported as unraisable."""

class Prepared:
    """The description of an in-place operation on one tensor that is submitted many times. It has everything except the
    address of the tensor."""

    def __init__(
        self,
        op: int,
        dtype: int,
        shape: Sequence[int],
        name: str,
        reduce_op: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        wire_dtype: int = 0,
        device: int = -1,
    ) -> None: ...

@dataclass(kw_only=True)
class EngineConfig:
    """The connections of an :class:`Engine`, and its settings."""

    rank: int = 0
    size: int = 1
    host: int = 0
    """Index of this process's host."""
    peers: Sequence[tuple[int, int, int, int, int]] = ()
    """``(rank, host, stream_fd, segment_fd, doorbell_fd)`` of each other rank. The engine takes ownership of every
    descriptor in this object, even if it fails to start."""
    lanes: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """The descriptors of the connections beyond ``stream_fd``, by rank on another host."""
    segment_fd: int = -1
    doorbell_fd: int = -1
    link_latency: float = 0.0
    link_bandwidth: float = 0.0
    mpi: Mapping[str, object] | None = None
    """The fields of ``hp_mpi`` by name."""

    libcrypto: Mapping[str, int] | None = None
    """The fields of ``hp_libcrypto`` by name; None: traffic to other hosts is not encrypted."""

    keys: Mapping[int, bytes] = field(default_factory=dict)
    """The encryption keys of the connections to each rank (``hp_peer.keys``), by rank."""
    connection_requests: int = -1
    """A stream socket to which the engine writes the ranks that it needs connections to
    (``hp_config.connection_requests_fd``); -1: all connections exist."""
    gpu_files: Sequence[str] = ()

    # Settings: the rows of settings.def, written by scripts/settings.py.
    fusion_threshold: int = 134217728
    separate_groups: bool = False
    cache_capacity: int = 8192
    plan_after: int = 3
    bucket_bytes: int = 8388608
    autotune: bool | None = None
    autotune_log: str | None = None
    autotune_warmup: int = 3
    autotune_steps: int = 10
    autotune_samples: int = 20
    autotune_fixed: int = 0
    algorithm: str | None = None
    gpu_algorithm: str | None = None
    data_timeout: float = 30.0
    operation_timeout: float = 1800.0
    deadlock_time: float = 5.0
    stall_check_time: float = 60.0
    stall_shutdown_time: float = 0.0
    local_rank: int = 0
    progress_cpu: int = -1
    processor_quota: float = 0.0
    process_sets: str | None = None
    transfers_outlive_ranks: bool = False
    log_level: int = 3
    operation_limit_set_by: str | None = (
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS and HOROPLUG_OPERATION_TIMEOUT_SECONDS set"
    )
    restart: str | None = "call init() again"
    # End of the settings.

    log: Callable[[int, str], None] | None = None
    """Called with (level, text) of each log message, in a separate thread; None: messages go to stderr."""

class Engine:
    """One rank's engine. Methods release the GIL while they block."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the engine. Collective: returns when all ranks have started. Raises :class:`Error` if the ranks'
        settings differ, a rank does not start in time, or a setting is invalid."""

    def submit(
        self,
        op: int,
        dtype: int,
        tensors: Sequence[tuple[int, int, Sequence[int]]],
        name: str | None = None,
        reduce_op: int = 0,
        root: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        splits: Sequence[int] | None = None,
        process_set: int = 0,
        wire_dtype: int = 0,
        tag: int = 0,
        layout: str | None = None,
        device: int = -1,
        stream: int = 0,
    ) -> int:
        """Submit an operation on ``tensors``, each ``(input address, output address or 0, shape)``; returns its handle.

        For tensors on a GPU, ``device`` is its ordinal, and the operation runs after the work that is in ``stream`` (a
        CUstream) now.

        ``layout`` says in words what the tensors are parts of, such as the indices and values of a sparse tensor. It
        has to be the same on all ranks.

        The caller keeps the memory alive until the handle is done. Raises :class:`Error` at once for invalid
        arguments, a duplicate name, or an engine that has been shut down or aborted."""

    def perform(
        self,
        op: int,
        dtype: int,
        tensors: Sequence[tuple[int, int, Sequence[int]]],
        name: str | None = None,
        reduce_op: int = 0,
        root: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        splits: Sequence[int] | None = None,
        process_set: int = 0,
        wire_dtype: int = 0,
        tag: int = 0,
        layout: str | None = None,
        device: int = -1,
        stream: int = 0,
        keep: bool = True,
    ) -> int:
        """:meth:`submit`, and wait briefly without waking another thread; the caller continues with :meth:`wait`. With
        ``keep`` false, an operation that is done meanwhile is released, and the result is 0 instead of the handle.
        Raises :class:`Error` also if the operation fails meanwhile; it is then released."""

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Register a process set of these ranks, in ascending order; returns a handle. :meth:`value` then gives the id
        of the set. Collective: all ranks of the job call this."""

    def remove_process_set(self, process_set: int) -> int:
        """Remove the process set with this id; returns a handle. Collective."""

    def join(self, process_set: int = 0) -> int:
        """Declare that this rank submits nothing more until all ranks have joined; returns a handle. :meth:`value` then
        gives the rank that joined last."""

    def value(self, handle: int) -> int:
        """The result of an operation of :meth:`add_process_set`, :meth:`remove_process_set` or :meth:`join` that is
        done; the source of a recv that is done."""

    def create_buffer(self, nbytes: int) -> int:
        """Create a buffer that the ranks of a host share; returns a handle. :meth:`take_buffer` then gives the buffer.
        Collective, with the same size on all ranks."""

    def take_buffer(self, handle: int) -> Buffer:
        """The buffer of a handle that is done. Can be called once."""

    def submit_batch(
        self, prepared: Sequence[Prepared], addresses: Sequence[int], stream: int = 0
    ) -> tuple[list[int], Error | None]:
        """Submit operations in order, each on the tensor at the address of the same index, until one is refused.
        Returns the handles of the submitted operations, and the error of the refused one."""

    def poll(self, handle: int) -> bool:
        """Whether the operation is done, successfully or not. Does not raise for a failed operation."""

    def wait(self, handle: int, timeout: float = -1.0) -> bool:
        """Block until done, for at most ``timeout`` seconds (negative: no limit). Returns whether it is. Raises
        :class:`Error` if the operation failed. Can be interrupted by signal handlers."""

    def note_waits(self, handles: Sequence[int], threads: Sequence[int]) -> None:
        """Say that the calling thread waits for these operations for the sake of other threads, which seem to wait
        outside of the core, by their identifiers (``threading.get_ident``). Called every 0.25 s or so meanwhile."""

    def signal_when_done(self, handle: int, fd: int) -> None:
        """Add 1 to the eventfd ``fd`` when the operation is done, successfully or not; at once if it is. Once for each
        handle. The eventfd has to stay open until then, or until the engine has shut down."""

    def wait_batch(self, handles: Sequence[int]) -> list[tuple[int, Error]]:
        """Block until all are done. Returns ``(index in handles, error)`` of each that failed. Can be interrupted by
        signal handlers."""

    def stream_wait(self, handle: int, stream: int) -> None:
        """Make ``stream`` wait for an operation on a GPU: work that is enqueued on ``stream`` from now on runs after
        it. The operation must be done, which means that its work is in the core's stream. Raises :class:`Error` if the
        operation failed."""

    def stream_wait_batch(self, handles: Sequence[int], stream: int) -> None: ...
    def device_allocate(self, device: int, nbytes: int, stream: int) -> DeviceMemory:
        """Memory for work that is enqueued on ``stream`` from now on; freed in the order of that stream."""

    def result(self, handle: int, index: int = 0, stream: int = 0) -> Result:
        """The result of tensor ``index``. Only the first call gets its ``memory``. ``stream``: memory on a GPU is freed
        in the order of this stream."""

    def release(self, handle: int) -> None:
        """Free a handle. One that is still in flight is freed when it is done."""

    def release_batch(self, handles: Sequence[int]) -> None: ...
    @property
    def address(self) -> int:
        """The ``hp_engine*``, for other bindings in this process. Valid while this object lives."""

    def shutdown(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def set_limits(self, data_timeout: float, operation_timeout: float) -> None:
        """Change two limits of :class:`EngineConfig`, for operations in flight, too; on all ranks. Seconds; 0:
        no limit."""

    def attach(self, group: Engine, name: str, ranks: Sequence[int]) -> None:
        """Take the operations of another engine of this process into the search for deadlocks. ``name``: names it in
        error texts, the same on all ranks; ``ranks``: the numbers of its ranks in this engine."""

    def add_connection(self, rank: int, fds: Sequence[int], keys: bytes) -> None:
        """The connections to a rank that was not connected, by lane, and the encryption keys of all of them; no keys:
        they are not encrypted. The engine owns the descriptors."""

    def fail_connection(self, rank: int, reason: str) -> None:
        """Connections to a rank that the engine has asked for cannot be made: the job fails. ``reason`` completes
        "rank 5: "."""
    def stats(self) -> dict[str, int]:
        """The counters of ``hp_stats`` by name."""

    def timeline_start(self, path: str | bytes, mark_cycles: bool = False) -> None:
        """Write a timeline to a file from now on, and complete the current one. Does nothing on ranks other than 0.
        Raises :class:`Error` if the file cannot be written."""

    def timeline_stop(self) -> None:
        """Complete the timeline, if there is one."""

def version() -> str: ...
def cpu_kernels() -> str: ...
def algorithms() -> str:
    """One line per algorithm: ``op name medium``."""

def gpu_capabilities(files: Sequence[str]) -> str:
    """One line each for the CUDA driver, NVRTC, NCCL and the compiled kernels: ``[X] name (where)`` or
    ``[ ] name: reason``. ``files``: paths of ``kernels.fatbin`` and of libraries. A library that is loaded already is
    preferred to these, and these to the system's. Initializes CUDA in this process."""

def nccl_version(files: Sequence[str]) -> int:
    """The version of NCCL, such as 22304; 0: none. ``files``: as for :func:`gpu_capabilities`."""

class DlpackTensor:
    """An array of another library, imported through DLPack. It is released when this object is garbage collected."""

    @property
    def address(self) -> int:
        """Address of the first element; undefined for an array without elements."""

    @property
    def device(self) -> tuple[int, int]:
        """DLPack's device type, and the ordinal."""

    @property
    def dtype(self) -> tuple[int, int, int]:
        """DLPack's code, bits, and lanes."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...] | None:
        """Strides in elements; None for a contiguous array in row-major order."""

    @property
    def read_only(self) -> bool: ...
    @property
    def copied(self) -> bool:
        """Whether this is a copy: writing to it does not change the original array."""

def take_dlpack(capsule: object) -> DlpackTensor:
    """Import the capsule that ``__dlpack__`` has returned. Raises BufferError for any other object, and for a major
    version of DLPack other than 1."""

def give_dlpack(
    owner: object,
    address: int,
    device: tuple[int, int],
    dtype: tuple[int, int],
    shape: Sequence[int],
    versioned: bool,
) -> object:
    """A DLPack capsule of a row-major array, for ``__dlpack__`` to return. ``owner`` keeps the memory alive. ``dtype``:
    DLPack's code and the number of bits."""

def address_of(buffer: object) -> int | None:
    """Address of the memory of a contiguous object with the buffer protocol; None if it does not export it."""

def dtypes() -> list[tuple[int, str, int, str, str, int]]:
    """``(code, name, bytes of an element, MPI's name or "", package, DLPack's code)`` of every dtype, by ascending code
    from 0. The names are those of NumPy's types, which the package (numpy or ml_dtypes) defines."""

def dtype_size(dtype: int) -> int:
    """Bytes of an element; 0 for an unknown code."""

def value_or_raise(future: Any) -> Any:
    """The value of a future of PyTorch that is complete. An exception is raised, without a traceback."""

def guard_exit(seconds: float, text: str) -> None:
    """Limit the time that this process takes to exit: after ``seconds``, it prints ``text`` to stderr and ends with
    status 1. The time counts from the end of Python's finalization, when the exit handlers of C libraries begin to run;
    0: no handler runs. Only the first call has an effect."""
