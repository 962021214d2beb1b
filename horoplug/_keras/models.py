"""Loading of saved models."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any


def load_model(
    library: Any,
    wrap: Callable[..., Any],
    filepath: Any,
    custom_optimizers: Iterable[type] | None,
    custom_objects: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Any:
    """Load a model with ``keras`` or ``tf_keras`` and replace its optimizer by ``wrap(optimizer, **options)``."""
    known: dict[str, Any] = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = library.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        # `wrap` keeps the object, which holds the loaded variables.
        model.optimizer = wrap(model.optimizer, **options)
    return model
