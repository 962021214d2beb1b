"""What differs between the frameworks, for programs that run with each of them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from horoplug.common.errors import HorovodInternalError

INTEGERS = ("uint8", "int8", "int32", "int64")
FLOATS = ("float16", "float32", "float64")
COMPLEX = ("complex64", "complex128")


@dataclass(frozen=True)
class Framework:
    """One framework. ``tensor(values, dtype)`` makes a tensor of an array, ``array`` an array of a tensor."""

    hvd: ModuleType
    tensor: Callable[[np.ndarray, str], Any]
    array: Callable[[Any], np.ndarray]
    dtypes: tuple[str, ...]
    failure: type[Exception] = HorovodInternalError  # when a rank has died
    in_place: bool = False
    asynchronous: bool = False
    compression: bool = False  # of single operations
    rooted: bool = False  # reduce, gather, scatter, send and recv
    compilers: dict[str, Callable[..., Callable[..., Any]]] = field(default_factory=dict)


def _numpy() -> Framework:
    import horoplug as hvd

    return Framework(
        hvd,  # a module whose functions are those of horoplug.numpy
        lambda values, dtype: np.array(values, dtype),
        np.asarray,
        (*INTEGERS, "int16", "uint16", "uint32", "uint64", *FLOATS, *COMPLEX, "bool"),
        in_place=True,
        asynchronous=True,
        rooted=True,
    )


def _torch() -> Framework:
    import torch

    import horoplug.torch as hvd

    def array(tensor: Any) -> np.ndarray:
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()

    return Framework(
        hvd,
        lambda values, dtype: torch.tensor(values).to(getattr(torch, dtype)),
        array,
        (*INTEGERS, "int16", *FLOATS, "bfloat16", *COMPLEX, "bool"),
        in_place=True,
        asynchronous=True,
        compression=True,
        rooted=True,
    )


def _tensorflow() -> Framework:
    import tensorflow as tf

    import horoplug.tensorflow as hvd

    def array(tensor: Any) -> np.ndarray:
        tensor = tf.convert_to_tensor(tensor)
        return (tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor).numpy()

    return Framework(
        hvd,
        lambda values, dtype: tf.cast(tf.constant(values), dtype),
        array,
        (*INTEGERS, "int16", "uint16", *FLOATS, "bfloat16", *COMPLEX, "bool"),
        failure=tf.errors.UnknownError,  # TensorFlow has a class for each code
        compression=True,
        compilers={
            "tf.function": tf.function,
            "tf.function(jit_compile=True)": functools.partial(tf.function, jit_compile=True),
        },
    )


def _jax() -> Framework:
    import jax

    import horoplug.jax as hvd

    jax.config.update("jax_enable_x64", True)

    def array(tensor: Any) -> np.ndarray:
        return np.asarray(tensor.astype("float32") if tensor.dtype == "bfloat16" else tensor)

    return Framework(
        hvd,
        lambda values, dtype: jax.numpy.asarray(values, dtype=dtype),
        array,
        (*INTEGERS, "int16", "uint16", "uint32", "uint64", *FLOATS, "bfloat16", *COMPLEX, "bool"),
        compression=True,
        compilers={"jax.jit": jax.jit},
    )


def _mxnet() -> Framework:
    import mxnet as mx

    import horoplug.mxnet as hvd

    return Framework(
        hvd,
        lambda values, dtype: mx.nd.array(values, dtype=dtype),
        lambda tensor: tensor.asnumpy(),
        (*INTEGERS, *FLOATS),
        in_place=True,
    )


def load(name: str) -> Framework:
    makers = {"numpy": _numpy, "torch": _torch, "tensorflow": _tensorflow}
    return (makers | {"jax": _jax, "mxnet": _mxnet})[name]()
