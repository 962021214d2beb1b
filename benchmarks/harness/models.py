"""The gradients of known models: the shapes of their parameters, computed from the architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from horoplug.bench.cases import byte_count

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """He and others, Deep Residual Learning (2015), table 1, with batch normalisation: 161 tensors."""
    shapes: list[Shape] = []

    def convolution(inputs: int, outputs: int, width: int) -> None:
        shapes.extend([(outputs, inputs, width, width), (outputs,), (outputs,)])

    convolution(3, 64, 7)
    inputs = 64
    for blocks, planes in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolution(inputs, planes, 1)
            convolution(planes, planes, 3)
            convolution(planes, 4 * planes, 1)
            if block == 0:  # the shortcut changes the number of channels
                convolution(inputs, 4 * planes, 1)
            inputs = 4 * planes
    return [*shapes, (1000, inputs), (1000,)]


def bert_large() -> list[Shape]:
    """Devlin and others, BERT (2018), section 3: 24 layers of 1024, vocabulary of 30,522, with the pooler."""
    hidden, inner = 1024, 4096
    norm = [(hidden,), (hidden,)]
    dense: list[Shape] = [(hidden, hidden), (hidden,)]
    layer = [
        *(3 * dense),  # query, key, value
        *dense,
        *norm,
        *[(inner, hidden), (inner,), (hidden, inner), (hidden,)],
        *norm,
    ]
    embeddings = [(30522, hidden), (512, hidden), (2, hidden), *norm]
    return [*embeddings, *(24 * layer), *dense]


MODELS: dict[str, Callable[[], list[Shape]]] = {"resnet50": resnet50, "bert-large": bert_large}


def gradients(model: str) -> list[Shape]:
    """Shapes of a model's gradients, of float32 values, in the order of the backward pass: the last parameter
    first. ``200x1KiB`` is a model of 200 tensors of 1 KiB. Raises ValueError for an unknown model."""
    if model in MODELS:
        return MODELS[model]()[::-1]
    uniform = re.fullmatch(r"(\d+)x(\d+[KMG]?)(iB|B)?", model)
    if uniform is None:
        raise ValueError(f"{model}: not {', '.join(MODELS)} or like 200x1KiB")
    return [(max(1, byte_count(uniform[2]) // 4),)] * int(uniform[1])


def elements(shapes: list[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)
