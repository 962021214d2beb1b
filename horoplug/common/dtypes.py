"""Element types by the core's numbers (``hp_dtype`` in ``csrc/include/horoplug/horoplug.h``)."""

from typing import Final

# In the order of hp_dtype; the first ten numbers are Horovod's.
NAMES: Final = (
    "uint8",
    "int8",
    "uint16",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "bool",
    "bfloat16",
    "uint32",
    "uint64",
)
CODES: Final = {name: code for code, name in enumerate(NAMES)}
BOOL: Final = CODES["bool"]


def unsupported(dtype: object, supported: object) -> ValueError:
    """The error for a tensor whose element type the core does not know; ``supported``: an iterable of names."""
    names = ", ".join(str(name) for name in supported)  # type: ignore[attr-defined]
    return ValueError(f"dtype {dtype} is not supported; convert the tensor to one of: {names}.")
