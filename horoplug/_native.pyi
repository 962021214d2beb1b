"""The C core as Python sees it: a thin pybind11 layer over the C ABI (``csrc/include/horoplug/horoplug.h``)."""

from collections.abc import Callable, Mapping, Sequence

ABI_VERSION: int

class Error(Exception):
    """A failed call. ``args`` is ``(status, message)``; ``status`` is one of the ``HP_*`` numbers of the C ABI."""

    status: int

class Memory:
    """Memory the core allocated for a result; frees it when garbage collected. Supports the buffer protocol (bytes)."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class DeviceMemory:
    """Memory on a card that the core allocated; given back, in the order of its stream, when garbage collected. Its
    ``__cuda_array_interface__`` is that of writable bytes with no stream to wait for."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def stream(self) -> int:
        """It has to live as long as this object."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...

class Buffer:
    """This rank's part of a shared buffer; given back when garbage collected. Supports the buffer protocol (writable
    bytes). It does not need its engine any more."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Result:
    """What one tensor of a finished operation has produced."""

    @property
    def rows(self) -> int:
        """First dimension of the output."""

    @property
    def row_counts(self) -> list[int]:
        """Rows that came from each rank (allgather, alltoall); empty otherwise."""

    @property
    def memory(self) -> Memory | DeviceMemory | None:
        """The output, where the core allocated it (submitted with output address 0), on the device of the input."""

class Worker:
    """A thread of its own that calls functions, one after the other. It ends with this object, once it has called what
    was posted, and no engine uses it any more."""

    def __init__(self) -> None: ...
    def post(self, function: Callable[[], object]) -> None:
        """Have it call a function, which raises nothing."""

class Prepared:
    """An operation on one tensor, in place, that is submitted again and again: all of it but the tensor's address."""

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

class Engine:
    """One rank's engine. Methods release the GIL while they block."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        host: int,
        peers: Sequence[tuple[int, int, int, int, int]],
        segment_fd: int = -1,
        doorbell_fd: int = -1,
        fusion_threshold: int = 0,
        cache_capacity: int = 0,
        stall_check_time: float = 0.0,
        stall_shutdown_time: float = 0.0,
        data_timeout: float = 0.0,
        operation_timeout: float = 0.0,
        deadlock_time: float = 0.0,
        algorithm: str | None = None,
        log_level: int = 0,
        log: Callable[[int, str], None] | None = None,
        progress_cpu: int = -1,
        separate_groups: bool = False,
        process_sets: str = "",
        plan_after: int = 0,
        bucket_bytes: int = 0,
        autotune: tuple[int, int, int, int, int, str] = (0, 0, 0, 0, 0, ""),
        mpi: Mapping[str, object] | None = None,
        lanes: Mapping[int, Sequence[int]] = {},
        link_latency: float = 0.0,
        link_bandwidth: float = 0.0,
        gpu_files: Sequence[str] = (),
        local_rank: int = 0,
        gpu_algorithm: str | None = None,
    ) -> None:
        """Start an engine. ``peers``: ``(rank, host, stream_fd, segment_fd, doorbell_fd)`` each; ``lanes``: by rank,
        the descriptors of further connections. The engine takes ownership of every descriptor, also on failure. Units
        and defaults are those of ``hp_config``."""

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
        device: int = -1,
        stream: int = 0,
    ) -> int:
        """Submit an operation on ``tensors``, each ``(input address, output address or 0, shape)``; returns its handle.

        Tensors on a card: ``device`` is its number; the operation comes after what is in ``stream`` (a CUstream) now.

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
        device: int = -1,
        keep: bool = True,
        stream: int = 0,
    ) -> int:
        """The same, and wait for it for a moment, without waking another thread; :meth:`wait` ends the wait. Returns 0
        instead of the handle if the operation is done and, with ``keep`` false, forgotten. Raises :class:`Error` also
        if the operation fails meanwhile; its handle is forgotten then."""

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Have every rank (they all call this, with the same ascending ranks) know a new process set; returns a
        handle. :meth:`value` then gives its number."""

    def remove_process_set(self, process_set: int) -> int:
        """The opposite, for a set's number; returns a handle."""

    def join(self, process_set: int = 0) -> int:
        """Say that this rank submits nothing more until all have joined; returns a handle. :meth:`value` then gives
        the rank that was the last."""

    def value(self, handle: int) -> int:
        """The number that the operation of one of the three methods above has produced."""

    def create_buffer(self, nbytes: int) -> int:
        """Have every rank (they all call this, with the same size) get a buffer that its peers map too; returns a
        handle. :meth:`take_buffer` then gives it."""

    def take_buffer(self, handle: int) -> Buffer:
        """The buffer of a handle that is done, once."""

    def submit_many(
        self, prepared: Sequence[Prepared], addresses: Sequence[int], stream: int = 0
    ) -> tuple[list[int], Error | None]:
        """Submit each operation on the tensor at its address. At the first one that is refused it stops: returns the
        handles of those before it, and why it was."""

    def poll(self, handle: int) -> bool:
        """True when the operation is done, well or badly. Never raises for a failed operation."""

    def wait(self, handle: int) -> None:
        """Block until done. Raises :class:`Error` if the operation failed; KeyboardInterrupt gets through."""

    def wait_many(self, handles: Sequence[int]) -> list[tuple[int, Error]]:
        """Block until all are done. Returns the failed ones: place in ``handles``, and how; KeyboardInterrupt gets
        through."""

    def stream_wait(self, handle: int, stream: int) -> None:
        """Have what is put into a stream from now on come after an operation on the card, which is done: its work is in
        the core's stream. Raises :class:`Error` if the operation failed."""

    def stream_wait_many(self, handles: Sequence[int], stream: int) -> None: ...
    def device_allocate(self, device: int, nbytes: int, stream: int) -> DeviceMemory:
        """Memory for what is put into a stream from now on; given back in the order of that stream."""

    def result(self, handle: int, index: int = 0, stream: int = 0) -> Result:
        """Result of tensor ``index``; ``memory`` is handed over (once). ``stream``: in whose order memory on a card is
        given back."""

    def release(self, handle: int) -> None:
        """Forget a handle. A handle still in flight is forgotten when it is done."""

    def release_many(self, handles: Sequence[int]) -> None: ...
    @property
    def address(self) -> int:
        """Where the core has it (``hp_engine*``), for other bindings in this process. It goes away with this object."""

    def shutdown(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def stats(self) -> dict[str, int]:
        """Counters: batches, tensors, bytes, control_messages, control_bytes, cached_names, wakeups."""

    def timeline_start(self, path: str | bytes, mark_cycles: bool = False) -> None:
        """Write a timeline to a file from now on, in place of the current one. Does nothing but on rank 0. Raises
        :class:`Error` if the file cannot be written."""

    def timeline_stop(self) -> None:
        """Complete the timeline, if there is one."""

def version() -> str: ...
def cpu_kernels() -> str: ...
def algorithms() -> str:
    """One line per algorithm: ``op name medium``."""

def gpu_facts(files: Sequence[str]) -> str:
    """One line each for the CUDA driver, NVRTC, NCCL and where the kernels come from: ``[X] what (where)`` or
    ``[ ] what: why not``. ``files``: libraries to try after what is loaded already and before what the system has, and
    ``kernels.fatbin``. Starts CUDA in this process."""

class DlpackTensor:
    """Another library's array, which it gets back with the end of this object."""

    @property
    def address(self) -> int:
        """Of the first element; anything if there is none."""

    @property
    def device(self) -> tuple[int, int]:
        """DLPack's kind of device, and the ordinal."""

    @property
    def dtype(self) -> tuple[int, int, int]:
        """DLPack's code, bits, and lanes."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...] | None:
        """In elements; None: row-major, without gaps."""

    @property
    def read_only(self) -> bool: ...
    @property
    def copied(self) -> bool:
        """Writing to it does not change the array that it was taken from."""

def take_dlpack(capsule: object) -> DlpackTensor:
    """What ``__dlpack__`` has returned. BufferError for what is no such capsule, or of a version other than 1."""

def give_dlpack(
    owner: object,
    address: int,
    device: tuple[int, int],
    dtype: tuple[int, int],
    shape: Sequence[int],
    versioned: bool,
) -> object:
    """A capsule for ``__dlpack__`` to return, of a row-major array that ``owner`` keeps. ``dtype``: code and bits."""

def address_of(buffer: object) -> int | None:
    """Where the memory of a contiguous object with the buffer protocol begins; None if it does not export it."""

def dtype_size(dtype: int) -> int: ...
def guard_exit(seconds: float, text: str) -> None:
    """Have this process end with status 1, and this line on stderr, if its exit takes longer than that: from when
    Python has been finalised, and what C libraries have registered before is called (0: then). Only the first call
    counts."""
