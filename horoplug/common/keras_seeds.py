"""Keras' generators of random numbers in elastic states."""

from __future__ import annotations

from typing import Any

import numpy as np

from horoplug.common.object_state import keep_in_place


def keep_seeds(keras: Any) -> None:
    """Keep the ``SeedGenerator`` objects of this Keras in place. Keras 2 has none."""
    generators = getattr(keras, "random", None)
    kind = getattr(generators, "SeedGenerator", None)
    if kind is not None:
        convert = keras.ops.convert_to_numpy
        keep_in_place(
            kind,
            lambda generator: np.array(convert(generator.state)),
            lambda generator, state: generator.state.assign(state),
        )
