"""Memory in which the ranks of a host reduce without copies."""

from __future__ import annotations

from horoplug._native import Buffer, Error
from horoplug.common.context import context
from horoplug.common.status import exception


class SharedBuffer:
    """``nbytes`` bytes of memory on every rank, zeroed and aligned to a page, that the other ranks of the host map too.

    An allreduce whose tensors are their own outputs and lie in one buffer, at the same offsets on every rank, is done
    in place: nothing is packed or unpacked. Elsewhere, and on several hosts, the buffer is memory like any other.

    Every rank of the job makes its buffers in the same order and of the same sizes. The memory stays as long as this
    object or any view of it does, whatever becomes of the job; it may not go while an operation on it is in flight.

    Raises NotInitializedError before ``init()``, ValueError for a size that cannot be, and HorovodInternalError if the
    ranks give different sizes."""

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"a shared buffer needs a positive size, not {nbytes}")
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
        return self._buffer is None

    @property
    def nbytes(self) -> int:
        return self._open().nbytes

    @property
    def address(self) -> int:
        """Where this rank's part begins."""
        return self._open().address

    def view(self) -> memoryview:
        """This rank's part as writable bytes, for ``numpy.frombuffer`` or ``torch.frombuffer``. What is made of it
        keeps the memory."""
        return memoryview(self._open())

    def close(self) -> None:
        """Let go of the memory, which ends with its last view. Concerns this rank alone; may be repeated."""
        self._buffer = None

    def _open(self) -> Buffer:
        if self._buffer is None:
            raise ValueError("the shared buffer is closed")
        return self._buffer
