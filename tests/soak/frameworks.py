"""The frameworks whose tensors the operations of a soak test use, and the ways in which each runs operations.

A process imports a framework when it first needs it."""

import contextlib
import dataclasses
import importlib
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

import horoplug as hvd

Finish = Callable[[], Any]  # waits for an operation; returns an array, or a list for a group


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of an operation: the name of its function in every framework, and the arguments."""

    function: str
    arrays: list[np.ndarray]
    options: dict[str, Any]
    in_place: bool = False  # for frameworks that have such a variant

    def call(self, function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        is_group = self.function.startswith("grouped_")
        return function(list(tensors) if is_group else tensors[0], **self.options)


class Framework:
    """One way to run operations, for one thread."""

    any_order = False  # ranks may start the operations in different orders
    module = ""

    def __init__(self) -> None:
        self.hvd: Any = importlib.import_module(self.module)

    def has(self, function: str) -> bool:
        return hasattr(self.hvd, function)

    @property
    def eager(self) -> "Framework":
        """The same framework, outside of compiled programs and graphs."""
        return self

    def start(self, requests: Sequence[Request], key: Hashable) -> list[Finish]:
        """Start the operations. Requests with the same key are equal except for the values in their arrays.

        Failures are raised by the results, as HorovodInternalError in every framework."""
        raise NotImplementedError

    @contextlib.contextmanager
    def translating(self) -> Iterator[None]:
        """Raises the errors of other classes by which TensorFlow and XLA say that a job has failed or ranks differ as
        HorovodInternalError."""
        try:
            yield
        except hvd.HorovodInternalError:
            raise
        except Exception as error:
            if "a Horovod operation has failed" in str(error):
                raise hvd.HorovodInternalError(str(error)) from error
            raise

    def finish(self, wait: Callable[[], Any]) -> Finish:
        def finish() -> Any:
            with self.translating():
                result = wait()
                is_group = isinstance(result, (list, tuple))
                return [np.asarray(x) for x in result] if is_group else np.asarray(result)

        return finish


class _Numpy(Framework):
    """Operations with handles."""

    any_order = True
    module = "horoplug"

    def tensor(self, array: np.ndarray) -> Any:
        return array

    def start(self, requests: Sequence[Request], key: Hashable) -> list[Finish]:
        return [self._start(request) for request in requests]

    def _start(self, request: Request) -> Finish:
        name = f"{request.function}_async{'_' if request.in_place else ''}"
        tensors = [self.tensor(array) for array in request.arrays]
        try:
            handle = request.call(getattr(self.hvd, name), tensors)
        except hvd.HorovodInternalError as error:
            return _failed(error)

        def wait() -> Any:
            result = self.hvd.synchronize(handle)
            return result[0] if request.function == "alltoall" else result

        return self.finish(wait)


class _Torch(_Numpy):
    module = "horoplug.torch"

    def tensor(self, array: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(array)


class _Eager(Framework):
    """Operations that block, one after the other."""

    def tensor(self, array: np.ndarray) -> Any:
        raise NotImplementedError

    def call(self, request: Request, tensors: Sequence[Any]) -> Any:
        return request.call(getattr(self.hvd, request.function), tensors)

    def start(self, requests: Sequence[Request], key: Hashable) -> list[Finish]:
        return [self._run(request) for request in requests]

    def _run(self, request: Request) -> Finish:
        try:
            with self.translating():
                result = self.call(request, [self.tensor(array) for array in request.arrays])
        except Exception as error:
            return _failed(error)
        return self.finish(lambda: result)


class _Tensorflow(_Eager):
    module = "horoplug.tensorflow"

    def __init__(self) -> None:
        import tensorflow as tf

        tf.get_logger().setLevel("ERROR")  # it warns of functions that are traced often
        super().__init__()

    def tensor(self, array: np.ndarray) -> Any:
        import tensorflow as tf

        return tf.constant(array)


class _Jax(_Eager):
    module = "horoplug.jax"

    def __init__(self) -> None:
        import jax

        jax.config.update("jax_enable_x64", True)
        super().__init__()

    def tensor(self, array: np.ndarray) -> Any:
        import jax

        return jax.numpy.asarray(array)


class _Programs(_Eager):
    """All operations that are started at once are one program, which is compiled when its key is new."""

    plain: type[Framework]

    def __init__(self) -> None:
        super().__init__()
        self._programs: dict[Hashable, Callable[[list[list[Any]]], list[Any]]] = {}

    @property
    def eager(self) -> Framework:
        return self.plain()

    def compile(self, program: Callable[[list[list[Any]]], list[Any]]) -> Any:
        raise NotImplementedError

    def order(self, count: int) -> Sequence[int]:
        """The order in which a program calls its operations."""
        return range(count)

    def start(self, requests: Sequence[Request], key: Hashable) -> list[Finish]:
        if key not in self._programs:
            calls = [dataclasses.replace(request, arrays=[]) for request in requests]

            def program(inputs: list[list[Any]]) -> list[Any]:
                outputs: dict[int, Any] = {}
                for i in self.order(len(calls)):
                    outputs[i] = self.call(calls[i], inputs[i])
                return [outputs[i] for i in range(len(calls))]

            self._programs[key] = self.compile(program)
        inputs = [[self.tensor(array) for array in request.arrays] for request in requests]
        try:
            with self.translating():
                outputs = self._programs[key](inputs)
        except Exception as error:
            return [_failed(error)] * len(requests)
        return [self.finish(lambda output=output: output) for output in outputs]


class _TensorflowFunction(_Programs, _Tensorflow):
    """``tf.function``, in which ranks start the operations in different orders."""

    plain = _Tensorflow

    def compile(self, program: Callable[[list[list[Any]]], list[Any]]) -> Any:
        import tensorflow as tf

        return tf.function(program, autograph=False, reduce_retracing=True)

    def order(self, count: int) -> Sequence[int]:
        return random.Random(hvd.rank()).sample(range(count), count)


class _TensorflowCompiled(_Programs, _Tensorflow):
    """``tf.function`` that XLA compiles."""

    plain = _Tensorflow

    def compile(self, program: Callable[[list[list[Any]]], list[Any]]) -> Any:
        import tensorflow as tf

        return tf.function(program, autograph=False, jit_compile=True)


class _JaxCompiled(_Programs, _Jax):
    """``jax.jit``."""

    plain = _Jax

    def compile(self, program: Callable[[list[list[Any]]], list[Any]]) -> Any:
        import jax

        return jax.jit(program)


def _failed(error: Exception) -> Finish:
    def finish() -> Any:
        raise error

    return finish


WAYS: dict[str, type[Framework]] = {
    "numpy": _Numpy,
    "torch": _Torch,
    "tensorflow": _Tensorflow,
    "tensorflow function": _TensorflowFunction,
    "tensorflow compiled": _TensorflowCompiled,
    "jax": _Jax,
    "jax compiled": _JaxCompiled,
}
# Shapes in a program of XLA are fixed, and one thread of a process runs programs with operations.
COMPILED = ("tensorflow compiled", "jax compiled")
# The ways of each set of frameworks that a job may use. "training": a stream that trains with PyTorch.
JOBS = {
    "numpy": ("numpy",),
    "torch": ("numpy", "torch", "training"),
    "tensorflow": ("numpy", "tensorflow", "tensorflow function", "tensorflow compiled"),
    "jax": ("numpy", "jax", "jax compiled"),
    "all": (*WAYS, "training"),
}


def prepare(ways: Sequence[str]) -> None:
    """Import what the ways need and start the threads of the frameworks, so that neither takes time later, when other
    ranks wait."""
    array = np.ones((2, 2), "f4")
    for way in ways:
        if way == "training":
            from tests.soak.training import Training

            Training.prepare()
        elif isinstance(framework := WAYS[way](), _Programs):
            program = framework.compile(lambda inputs: [x + x for x in inputs])
            np.asarray(program([framework.tensor(array)])[0])
        else:
            np.asarray(framework.tensor(array))
