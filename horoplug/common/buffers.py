"""Shared buffers: memory in which the ranks of a host reduce without copies."""

from __future__ import annotations

from horoplug._native import Buffer, Error
from horoplug.common.context import context
from horoplug.common.status import exception


class SharedBuffer:
    """``nbytes`` bytes of memory on every rank that the other ranks of the host map as well. The memory is page-aligned
    and initially zero.

    An in-place allreduce of tensors in one buffer, at the same offsets on every rank, packs and unpacks nothing. For
    all other operations, and in a job on several hosts, the buffer behaves like any other memory.

    Collective: every rank of the job creates its buffers in the same order and with the same sizes. The memory lives as
    long as this object or any view of it, even after ``shutdown``. It must not be freed while an operation on it is in
    flight.

    Raises NotInitializedError before ``init()``, ValueError for an invalid size, and HorovodInternalError if the ranks
    give different sizes."""

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"a shared buffer needs a positive size in bytes, not {nbytes}")
        engine = context.engine()
        self._buffer: Buffer | None = None
        try:
            handle = engine.create_buffer(nbytes)
            try:
                engine.wait(handle)
                self._buffer = engine.take_buffer(handle)
            finally:
                engine.release(handle)
        except Error as error:
            raise exception(error) from None

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._buffer is None

    @property
    def nbytes(self) -> int:
        """Size of this rank's part in bytes."""
        return self._open().nbytes

    @property
    def address(self) -> int:
        """Address of this rank's part."""
        return self._open().address

    def view(self) -> memoryview:
        """This rank's part as writable bytes, for ``numpy.frombuffer`` or ``torch.frombuffer``. The view keeps the
        memory alive."""
        return memoryview(self._open())

    def close(self) -> None:
        """Release the memory, which is freed with its last view. Not collective; may be repeated."""
        self._buffer = None

    def _open(self) -> Buffer:
        if self._buffer is None:
            raise ValueError("the shared buffer is closed")
        return self._buffer
