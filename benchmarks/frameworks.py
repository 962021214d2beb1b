"""The same step through each framework: gradients are computed and averaged over the ranks.

    python benchmarks/frameworks.py -np 2
    python benchmarks/frameworks.py -np 2 --model 161x1KiB --model 1x4B

The gradients of a step are products of constants, in new memory, as from a backward pass; their consumer does nothing.
The model ``1x4B`` shows what one operation costs.

PyTorch             ``backward`` with the hooks of ``DistributedOptimizer``, and its ``synchronize``
TensorFlow, eager   ``DistributedGradientTape.gradient``
TensorFlow, graph   the same in a ``tf.function``
Keras, apply        ``DistributedOptimizer.apply`` of an optimizer that changes nothing, in a ``tf.function``
Keras, fit          a step of ``fit``: ``train_on_batch`` of a model whose optimizer looks at each gradient
JAX, jit            ``distributed_grad`` in ``jax.jit``

Each step alternates with the same one without horoplug (``alone``), and with those of the other frameworks, in blocks.
Each block starts horoplug anew: a program has one of these loops, and what horoplug has learned of the others is not to
disturb it. The first steps of a block are not timed. ``time`` and ``alone`` are medians on the slowest rank, and
``overhead`` is their difference. ``step`` and ``over`` are the ratios of time and overhead to those of PyTorch.
``messages``: control messages of rank 0 per step.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

import numpy as np
import torch
from harness.clock import BLOCKS, Summary
from harness.job import command_line, job, options_of, parse
from harness.models import elements, gradients
from harness.record import Column, Plot, Record

from horoplug.bench.cases import Run

ABOUT = """The gradients of a model, float32, computed as products of constants and averaged over the ranks, through
each framework: time per step. Alone: the same step without horoplug. Overhead: the difference."""

COLUMNS = {
    "model": Column("model", width=12),
    "tensors": Column("tensors", width=7),
    "bytes": Column("size", "B", width=11),
    "framework": Column("framework", width=17),
    "iterations": Column("n", width=4),
    "time": Column("time", "ms", ".3f", 9),
    "spread": Column("spread", "%", ".0f", 6),
    "alone": Column("alone", "ms", ".3f", 9),
    "overhead": Column("overhead", "ms", ".3f", 9),
    "step": Column("step", "x", ".2f", 6),
    "over": Column("over", "x", ".2f", 6),
    "messages": Column("messages", "", ".1f", 8),
    "wrong": Column("#wrong", width=6),
}
WARM_UP = 16
"""Steps: a plan is learned in five, and the frameworks' memory pools and threads settle."""


class Variant(NamedTuple):
    """``results`` makes a step and returns the gradients after it, one after the other in one array."""

    step: Run
    results: Callable[[], np.ndarray]


class Pair(NamedTuple):
    framework: str
    distributed: Variant
    alone: Variant


def flat(tensors: Any) -> np.ndarray:
    return np.concatenate([np.asarray(tensor).ravel() for tensor in tensors])


def pytorch(values: list[np.ndarray]) -> Pair:
    import horoplug.torch as hvd

    given = [torch.from_numpy(value.copy()) for value in values]
    one = torch.tensor(1.0)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, *parameters: Any) -> Any:
            return torch.zeros(())

        @staticmethod
        def backward(_: Any, outer: Any) -> Any:
            return tuple(grad * one for grad in given)

    def variant(is_distributed: bool) -> Variant:
        parameters = [torch.nn.Parameter(torch.empty(value.shape)) for value in values]
        optimizer: Any = torch.optim.SGD(parameters, lr=0.0)
        if is_distributed:
            named = [(f"gradient.{number}", p) for number, p in enumerate(parameters)]
            optimizer = hvd.DistributedOptimizer(optimizer, named)

        def step() -> None:
            optimizer.zero_grad()
            loss: Any = Loss.apply(*parameters)
            loss.backward()
            if is_distributed:
                optimizer.synchronize()

        def results() -> np.ndarray:
            step()
            return flat(parameter.grad for parameter in parameters)

        return Variant(step, results)

    return Pair("PyTorch", variant(True), variant(False))


def tensorflow(values: list[np.ndarray]) -> Iterator[Pair]:
    import keras
    import tensorflow as tf

    import horoplug.tensorflow as hvd
    import horoplug.tensorflow.keras as hvd_keras

    # One thread per rank: the ranks share the machine's cores.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    given = [tf.Variable(value) for value in values]
    variables = [keras.Variable(value) for value in values]
    one, seen = tf.Variable(1.0), tf.Variable(0.0)

    def fresh() -> list[Any]:
        return [grad * one for grad in given]

    @tf.custom_gradient
    def loss(*_: Any) -> tuple[Any, Callable[..., Any]]:
        return tf.constant(0.0), lambda outer, variables=None: fresh()

    def through_tape(wrap: Callable[[Any], Any]) -> Any:
        watched = [variable.value for variable in variables]
        with tf.GradientTape() as tape:
            value = loss(*watched)
        return wrap(tape).gradient(value, watched)

    def made(function: Callable[[], Any]) -> Variant:
        return Variant(function, lambda: flat(function()))

    for framework, mode in (("TensorFlow, eager", None), ("TensorFlow, graph", tf.function)):
        ways = [
            functools.partial(through_tape, wrap)
            for wrap in (hvd.DistributedGradientTape, lambda tape: tape)
        ]
        yield Pair(framework, *(made(mode(way) if mode else way) for way in ways))

    class Taking(keras.optimizers.Optimizer):
        """Changes no variable, but takes note of the gradients."""

        taken: list[Any]

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.taken.append(gradient)

    class Looking(keras.optimizers.Optimizer):
        """Reads an element of each gradient. TensorFlow would not compute one that nobody uses."""

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            seen.assign(tf.reshape(gradient, [-1])[0])

    class Storing(keras.optimizers.Optimizer):
        """Stores the gradients in their variables."""

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            variable.assign(gradient)

    def applying(optimizer: Any) -> Variant:
        optimizer.build(variables)

        @tf.function
        def step() -> Any:
            optimizer.taken = []
            optimizer.apply(fresh(), variables)
            return optimizer.taken

        return made(step)

    yield Pair(
        "Keras, apply", applying(hvd_keras.DistributedOptimizer(Taking(0.1))), applying(Taking(0.1))
    )

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            for value in values:
                self.add_weight(shape=value.shape, initializer="zeros")

        def call(self, inputs: Any) -> Any:
            return inputs + loss(*[weight.value for weight in self.trainable_weights])

    def fitting(wrap: Callable[[Any], Any]) -> Variant:
        row = tf.zeros((1, 1))

        def compiled(optimizer: Any) -> Any:
            model = Model()
            model.compile(optimizer=wrap(optimizer), loss=lambda _, output: tf.reduce_sum(output))
            return model

        model = compiled(Looking(0.1))

        def results() -> np.ndarray:
            storing = compiled(Storing(0.1))
            storing.train_on_batch(row, row)
            return flat(storing.trainable_weights)

        return Variant(lambda: model.train_on_batch(row, row), results)

    yield Pair("Keras, fit", fitting(hvd_keras.DistributedOptimizer), fitting(lambda same: same))


def of_jax(values: list[np.ndarray]) -> Pair:
    import jax
    import jax.numpy as jnp

    import horoplug.jax as hvd

    given = [jnp.asarray(value) for value in values]
    parameters = [jnp.zeros_like(value) for value in values]

    def loss(parameters: Any, given: Any) -> Any:
        return sum(jnp.sum(p * g) for p, g in zip(parameters, given, strict=True))

    def variant(grad: Callable[[Any], Any]) -> Variant:
        function = jax.jit(grad(loss))

        def step() -> Any:
            return jax.block_until_ready(function(parameters, given))

        return Variant(step, lambda: flat(step()))

    return Pair("JAX, jit", variant(hvd.distributed_grad), variant(jax.grad))


def wrong_elements(hvd: Any, variant: Variant, expected: np.ndarray) -> int:
    """The number of wrong elements after one step, summed over all ranks."""
    wrong = int((variant.results() != expected).sum())
    return int(hvd.allreduce(np.array([wrong], np.int64), op=hvd.Sum, name="check")[0])


def messages() -> int:
    from horoplug.common.context import context

    return int(context.engine().stats()["control_messages"])


class Times:
    """Of one variant: the seconds of each step, and the control messages of all of them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.messages = 0

    def block(self, hvd: Any, variant: Variant, steps: int) -> None:
        hvd.shutdown()
        hvd.init()
        for _ in range(WARM_UP):
            variant.step()
        hvd.barrier()
        before = messages()
        for _ in range(steps):
            start = time.perf_counter()
            variant.step()
            self.seconds.append(time.perf_counter() - start)
        self.messages += messages() - before

    def slowest(self, hvd: Any) -> Summary:
        return Summary.of(hvd.allreduce(np.array(self.seconds), op=hvd.Max, name="times"))


def measure(args: Any, hvd: Any, model: str, record: Record) -> None:
    shapes = gradients(model)
    size = elements(shapes) * 4
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2
    values = [np.full(shape, n % 7 + rank, np.float32) for n, shape in enumerate(shapes)]
    own = flat(values)
    pairs = [pytorch(values), *tensorflow(values), of_jax(values)]
    wrong = [
        wrong_elements(hvd, pair.distributed, own - rank + mean)
        + wrong_elements(hvd, pair.alone, own)
        for pair in pairs
    ]
    iterations = args.iterations or min(200, max(5, 2**32 // (size + 2**23)))
    times = [(Times(), Times()) for _ in pairs]
    for _ in range(BLOCKS):
        for pair, (distributed, alone) in zip(pairs, times, strict=True):
            distributed.block(hvd, pair.distributed, -(-iterations // BLOCKS))
            alone.block(hvd, pair.alone, -(-iterations // BLOCKS))
    first: tuple[float, float] | None = None
    for pair, (distributed, alone), bad in zip(pairs, times, wrong, strict=True):
        summary, median_alone = distributed.slowest(hvd), alone.slowest(hvd).median
        overhead = summary.median - median_alone
        first = first or (summary.median, overhead)
        record.row(
            model=model,
            tensors=len(shapes),
            bytes=size,
            framework=pair.framework,
            iterations=len(distributed.seconds),
            time=summary.median * 1e3,
            spread=summary.spread * 100,
            alone=median_alone * 1e3,
            overhead=overhead * 1e3,
            step=summary.median / first[0],
            over=overhead / first[1],
            messages=distributed.messages / len(distributed.seconds),
            wrong=bad,
        )


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add(
        "--model",
        action="append",
        default=[],
        help="resnet50, bert-large, or like 200x1KiB; may be repeated [resnet50, 161x1KiB and 1x4B]",
    )
    add("-n", dest="iterations", type=int, default=0, help="iterations [5 to 200, by size]")
    args = parse(parser)
    torch.set_num_threads(1)
    with job(args) as (own, _):
        hvd = own.hvd
        record = Record(
            "frameworks",
            f"the same step through each framework, {hvd.size()} ranks on {hvd.cross_size()} host(s)",
            ABOUT,
            COLUMNS,
            [
                Plot("bars", "model", "step", "framework"),
                Plot("bars", "model", "over", "framework"),
            ],
            ranks=hvd.size(),
            options=options_of(args),
            peers=[],
            speaks=hvd.rank() == 0,
        )
        for model in args.model or ["resnet50", "161x1KiB", "1x4B"]:
            measure(args, hvd, model, record)
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
