"""The texts of the core and of the rendezvous in the terms of ``torch.distributed``.

They name variables that set limits, where a process group has the argument ``timeout``, and horoplug's own calls, where
it has those of PyTorch."""

from __future__ import annotations

from typing import Any

_ARGUMENT = "the argument timeout of init_process_group or new_group sets"
_TEXTS = {
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS and HOROPLUG_OPERATION_TIMEOUT_SECONDS set the": f"{_ARGUMENT} the",
    "HOROVOD_START_TIMEOUT and HOROVOD_GLOO_TIMEOUT_SECONDS set how long": f"{_ARGUMENT} how long",
    "this rank has shut down; call init() again": "this rank has left the process group; create the group again",
    "no operation can run any more until every rank calls init() again": (
        "no operation of the process group can run any more until every rank creates the group again"
    ),
    "torch.cuda.set_device(hvd.local_rank())": 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
}


def in_its_terms(text: Any) -> Any:
    """``text`` in the terms of ``torch.distributed``. What is not a text stays as it is."""
    if isinstance(text, str):
        for of_the_core, own in _TEXTS.items():
            text = text.replace(of_the_core, own)
    return text
