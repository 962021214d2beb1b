"""Time to average all gradients of a model once, through TensorFlow and Keras, beside PyTorch.

    python benchmarks/keras_fit.py -np 2
    python benchmarks/keras_fit.py -np 2 --model 200x1KiB

The consumer of the gradients does nothing: the time is that of the reduction and of the framework's calls around it.
Variants:

torch          ``DistributedOptimizer.synchronize()`` of horoplug.torch, as in gradients.py
tape           ``DistributedGradientTape.gradient`` in a ``tf.function``
tape, alone    the same without horoplug: the time to write the gradients, which exist already in the torch variant
keras          ``DistributedOptimizer.apply`` of a Keras optimizer that changes nothing, in a ``tf.function``
keras, alone   the same without horoplug

``ratio`` is the median over that of torch. For ``net``, the time of the variant called alone is subtracted first.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import torch
from harness.clock import Summary, alternate
from harness.job import command_line, job, options_of, parse
from harness.models import elements, gradients
from harness.record import Column, Plot, Record

from horoplug.bench.cases import Run

ABOUT = """All gradients of a model, float32, averaged over the ranks through PyTorch, a gradient tape and a Keras
optimizer: time per step. Nothing is computed."""

COLUMNS = {
    "model": Column("model", width=12),
    "tensors": Column("tensors", width=7),
    "bytes": Column("size", "B", width=11),
    "variant": Column("variant", width=14),
    "iterations": Column("n", width=4),
    "time": Column("time", "ms", ".3f", 10),
    "spread": Column("spread", "%", ".0f", 6),
    "ratio": Column("ratio", "x", ".2f", 7),
    "net": Column("net", "x", ".2f", 7),
    "wrong": Column("#wrong", width=6),
}


class Variant(NamedTuple):
    """``results`` makes a step and returns the gradients after it, one after the other in one array."""

    name: str
    step: Run
    results: Callable[[], np.ndarray]
    reduces: bool = True


def flat(tensors: Any) -> np.ndarray:
    return np.concatenate([np.asarray(tensor).ravel() for tensor in tensors])


def torch_variant(values: list[np.ndarray]) -> Variant:
    import horoplug.torch as hvd

    parameters = [torch.nn.Parameter(torch.empty(value.shape)) for value in values]
    grads = [torch.from_numpy(value.copy()) for value in values]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    named = [(f"gradient.{number}", p) for number, p in enumerate(parameters)]
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named)

    def results() -> np.ndarray:
        optimizer.synchronize()
        return flat(grads)

    return Variant("torch", optimizer.synchronize, results)


def tensorflow_variants(values: list[np.ndarray]) -> Iterator[Variant]:
    import keras
    import tensorflow as tf

    import horoplug.tensorflow as hvd
    import horoplug.tensorflow.keras as hvd_keras

    # One thread per rank: the ranks share the machine's cores.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    given = [tf.Variable(value) for value in values]
    variables = [keras.Variable(value) for value in values]
    one = tf.Variable(1.0)

    def fresh() -> list[Any]:
        """Gradients in new memory, as from a backward pass."""
        return [grad * one for grad in given]

    @tf.custom_gradient
    def loss(*_: Any) -> tuple[Any, Callable[..., Any]]:
        def gradient(outer: Any, variables: Any = None) -> Any:
            return fresh()

        return tf.constant(0.0), gradient

    class Nothing(keras.optimizers.Optimizer):
        """An optimizer that only keeps the gradients, for ``results``."""

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            taken.append(gradient)

    taken: list[Any] = []

    def through_tape(wrap: Callable[[Any], Any]) -> Any:
        watched = [variable.value for variable in variables]
        with tf.GradientTape() as tape:
            value = loss(*watched)
        return wrap(tape).gradient(value, watched)

    def through_keras(optimizer: Any) -> Any:
        del taken[:]
        optimizer.apply(fresh(), variables)
        return list(taken)

    def variant(name: str, function: Callable[[], Any], reduces: bool) -> Variant:
        step = tf.function(function)
        return Variant(name, step, lambda: flat(step()), reduces)

    yield variant("tape", lambda: through_tape(hvd.DistributedGradientTape), True)
    yield variant("tape, alone", lambda: through_tape(lambda tape: tape), False)
    for name, optimizer in (
        ("keras", hvd_keras.DistributedOptimizer(Nothing(0.1))),
        ("keras, alone", Nothing(0.1)),
    ):
        optimizer.build(variables)
        yield variant(name, functools.partial(through_keras, optimizer), name == "keras")


def wrong_elements(hvd: Any, variant: Variant, expected: np.ndarray, own: np.ndarray) -> int:
    """The number of wrong elements after one step, summed over all ranks."""
    wrong = int((variant.results() != (expected if variant.reduces else own)).sum())
    return int(hvd.allreduce(np.array([wrong], np.int64), op=hvd.Sum, name="check")[0])


def measure(args: Any, hvd: Any, model: str, record: Record) -> None:
    shapes = gradients(model)
    size = elements(shapes) * 4
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2
    values = [np.full(shape, n % 7 + rank, np.float32) for n, shape in enumerate(shapes)]
    own = flat(values)
    variants = [torch_variant(values), *tensorflow_variants(values)]
    wrong = [wrong_elements(hvd, variant, own - rank + mean, own) for variant in variants]
    iterations = args.iterations or min(200, max(5, 2**32 // (size + 2**23)))
    times = alternate(hvd, [variant.step for variant in variants], iterations)
    medians = {v.name: Summary.of(t).median for v, t in zip(variants, times, strict=True)}
    first = medians["torch"]
    for variant, seconds, bad in zip(variants, times, wrong, strict=True):
        summary = Summary.of(seconds)
        alone = medians.get(f"{variant.name}, alone", 0.0)
        record.row(
            model=model,
            tensors=len(shapes),
            bytes=size,
            variant=variant.name,
            iterations=len(seconds),
            time=summary.median * 1e3,
            spread=summary.spread * 100,
            ratio=summary.median / first,
            net=(summary.median - alone) / first if variant.reduces else None,
            wrong=bad,
        )


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--model", default="resnet50", help="resnet50, bert-large, or like 200x1KiB [resnet50]")
    add("-n", dest="iterations", type=int, default=0, help="iterations [5 to 200, by size]")
    args = parse(parser)
    torch.set_num_threads(1)
    with job(args) as (own, _):
        hvd = own.hvd
        record = Record(
            "keras_fit",
            f"gradients through frameworks, {hvd.size()} ranks on {hvd.cross_size()} host(s)",
            ABOUT,
            COLUMNS,
            [Plot("bars", "model", "time", "variant"), Plot("bars", "model", "ratio", "variant")],
            ranks=hvd.size(),
            options=options_of(args),
            peers=[],
            speaks=hvd.rank() == 0,
        )
        measure(args, hvd, args.model, record)
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
