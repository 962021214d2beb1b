"""Names what sets a time limit of a process group.

The core and the rendezvous name the variables that set their limits. In a process group, the argument ``timeout`` sets
them."""

from __future__ import annotations

from typing import Any

_ARGUMENT = "the argument timeout of init_process_group or new_group sets"
_TEXTS = {
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS and HOROPLUG_OPERATION_TIMEOUT_SECONDS set the": f"{_ARGUMENT} the",
    "HOROVOD_START_TIMEOUT and HOROVOD_GLOO_TIMEOUT_SECONDS set how long": f"{_ARGUMENT} how long",
}


def name_the_argument(text: Any) -> Any:
    """``text`` with the argument in place of variables. What is not a text stays as it is."""
    if isinstance(text, str):
        for variables, argument in _TEXTS.items():
            text = text.replace(variables, argument)
    return text
