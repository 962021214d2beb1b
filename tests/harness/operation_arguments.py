"""The rows of the operations for tests/harness/arguments.py: on two ranks, for NumPy arrays and PyTorch tensors."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import horoplug as hvd
from horoplug.common.variants import operation_of
from tests.harness import arguments
from tests.harness.arguments import NoEffect, Outcomes, ShownBy

BUSY = "busy"
COLLECTIVES = (
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "reduce",
    "gather",
    "scatter",
)
ROOTED = ("broadcast", "reduce", "gather", "scatter")
POINT_TO_POINT = {"send": "dest", "recv": "source"}

_SETS = ShownBy("tests/core/test_process_sets.py")
_OBJECTS = ShownBy("tests/core/test_objects.py")
_TIMELINE = ShownBy("tests/core/test_timeline.py")
COMMON: dict[str, dict[str, Any]] = {
    "ProcessSet": {"ranks": [1]},
    "add_process_set": {"process_set": ["a"]},
    "remove_process_set": {"process_set": 1},
    "init": {"comm": _SETS, "process_sets": _SETS},
    "start_timeline": {"file_path": _TIMELINE, "mark_cycles": _TIMELINE},
    "poll": {"handle": "handle"},
    "synchronize": {"handle": "handle"},
    "barrier": {"process_set": hvd.ProcessSet([0])},
    "join": {
        "device": NoEffect("tensors of zeros are not needed on a device"),
        "process_set": hvd.ProcessSet([0]),
    },
    "allgather_object": {"obj": "other", "name": _OBJECTS, "process_set": hvd.ProcessSet([0])},
    "broadcast_object": {
        "obj": "other",
        "root_rank": 1,
        "name": _OBJECTS,
        "process_set": hvd.ProcessSet([0]),
    },
    "send_object": {"obj": _OBJECTS, "dest": 9, "tag": "text", "process_set": hvd.ProcessSet([0])},
    "recv_object": {"source": 9, "tag": "text", "process_set": hvd.ProcessSet([0])},
}
"""Functions that are the same in all frameworks. A set that is not registered is an error."""
USUAL: dict[str, dict[str, Any]] = {
    "ProcessSet": {"ranks": [0]},
    "add_process_set": {"process_set": [0, 1]},  # is the global one: an error
    "remove_process_set": {"process_set": hvd.global_process_set},
    "poll": {"handle": 0},
    "synchronize": {"handle": 0},
    "allgather_object": {"obj": "object"},
    "send_object": {"obj": "object", "dest": 8},
    "recv_object": {"source": 8},
}


@contextlib.contextmanager
def name_in_flight(x: Any, module: Any) -> Any:
    """While rank 0 runs the block, an operation of each kind with the name BUSY is in flight there."""
    handles = []

    def start() -> None:
        for operation in COLLECTIVES:
            root = (0,) if operation in ROOTED else ()
            handles.append(getattr(module, f"{operation}_async")(x, *root, name=BUSY))

    if hvd.rank() == 0:
        start()
    yield
    hvd.barrier()
    if hvd.rank() != 0:
        start()
    for handle in handles:
        hvd.synchronize(handle)


def check(
    module: Any,
    make: Callable[[], Any],
    known: Any = None,
    own: Mapping[str, Mapping[str, Any]] | None = None,
    runs: Mapping[str, Callable[..., Any]] | None = None,
    skipped: tuple[str, ...] = (),
) -> list[str]:
    """The arguments of a module's functions whose change this rank does not see. ``make``: a new tensor of 4 rows.
    ``own``: rows of functions of this module only; ``runs``: what calls them, with the changed arguments only, and
    returns what is compared."""
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    alone = sets[hvd.rank()]
    tables = {**COMMON, **(own or {})}
    standards = {**USUAL, "broadcast_object": {"obj": hvd.rank()}}
    functions = arguments.public_functions(module, known)

    def usual(name: str) -> dict[str, Any]:
        if name in tables:
            return {**standards.get(name, {})}
        values = {"tensors": [make()]} if name.startswith("grouped_") else {"tensor": make()}
        operation = operation_of(name)
        if operation in ROOTED:
            values["root_rank"] = 0
        elif operation in POINT_TO_POINT:
            values[POINT_TO_POINT[operation]] = 8  # does not exist
        return values

    def busy(name: str) -> tuple[str, str]:
        if hvd.rank() != 0:
            return "", ""
        named = {**usual(name), "name": BUSY}
        return arguments.outcome(lambda: "done"), arguments.outcome(
            lambda: functions[name](**named)
        )

    def rows(name: str) -> Mapping[str, Any]:
        if name in tables:
            return tables[name]
        operation = operation_of(name)
        collective = operation in COLLECTIVES
        values: dict[str, Any] = {
            "tensor": make() * 2,
            "tensors": [make() * 2],
            "average": False,
            "op": hvd.Sum,
            "prescale_factor": 2.0,
            "postscale_factor": 3.0,
            "name": Outcomes(functools.partial(busy, name)) if collective else 3,
            "process_set": alone if collective else hvd.ProcessSet([0]),
            "root_rank": 1,
            "splits": [1, 3],
            "dest": 9,
            "source": 9,
            "tag": "text",
        }
        if hasattr(module, "Compression"):
            values["compression"] = module.Compression.fp16
        if operation in POINT_TO_POINT:
            values["tensor"] = "text"
        accepted = arguments.inspect.signature(functions[name]).parameters
        return {key: value for key, value in values.items() if key in accepted}

    def run(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        own_run = (runs or {}).get(function.__name__)
        if own_run is not None:
            return own_run(**values)
        result = function(**values)
        if function.__name__.endswith(("_async", "_async_")) and isinstance(result, int):
            return hvd.synchronize(result)
        return result

    functions = {
        name: function
        for name, function in functions.items()
        if name not in skipped and arguments.inspect.signature(function).parameters
    }
    named = {
        n: f for n, f in functions.items() if n not in tables and operation_of(n) in COLLECTIVES
    }
    others = {n: f for n, f in functions.items() if n not in named}

    def only_name(name: str) -> Mapping[str, Any]:
        every = rows(name)
        return {k: v if k == "name" else ShownBy(__file__) for k, v in every.items()}

    def without_name(name: str) -> Mapping[str, Any]:
        return {k: ShownBy(__file__) if k == "name" else v for k, v in rows(name).items()}

    arguments.check_rows(functions, rows)  # before the ranks wait for each other
    with name_in_flight(make(), module):
        unseen = arguments.without_effect(named, usual, only_name, run) if hvd.rank() == 0 else []
    unseen += arguments.without_effect(named, usual, without_name, run)
    unseen += arguments.without_effect(others, usual, rows, run)
    for each in sets:
        hvd.remove_process_set(each)
    return unseen


def array() -> Any:
    return np.arange(4, dtype=np.float32) + np.float32(1 / 3 + 10 * hvd.rank())


def unseen_by_all(results: list[list[str]]) -> list[str]:
    """The arguments whose change no rank has seen."""
    names = [{each.partition("=)")[0] for each in result} for result in results]
    common = set.intersection(*names)
    return sorted(each for each in results[0] if each.partition("=)")[0] in common)
