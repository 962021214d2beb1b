"""Mistakes that users make in calls of a framework, and what they read then: in each framework, under each launcher.

A test calls texts_of() on each rank, or runs the program REPORT under a launcher; check_texts() and check_reports()
check what the ranks have got.
"""

import importlib
import json
import re
import sys
from typing import Any, NamedTuple

# For the ranks: a deadlock is reported after a second.
ENVIRONMENT = {"HOROVOD_DEADLOCK_TIME_SECONDS": "1"}
# The program of a rank that makes the mistakes with NumPy.
REPORT = """
from tests.harness.user_errors import report
report("numpy")
"""

# What users of a front end do not know, or need not.
FOREIGN = {
    "horovodrun": r"hvd\.|num_proc\b(?!:)|[a-z]+_timeout",
    "horoplug.run": r"(?<![\w-])--?[a-z]|horovodrun",
    "framework": r"(?<![\w-])--?[a-z]|horovodrun|torch\.distributed|process group\b",
    "torch.distributed": r"(?<![\w-])--?[a-z]|hvd\.|init\(\)|HOROVOD_\w+|horovodrun",
}


def check(front: str, text: str) -> None:
    """The text is one line in the front end's words, and does not end with a period."""
    assert "\n" not in text, text
    assert not re.search(FOREIGN[front], text), text
    assert not text.endswith("."), text


def tensors(framework: str) -> Any:
    """Makes a tensor from a list and the name of a dtype."""
    if framework == "torch":
        import torch

        return lambda values, dtype="float32": torch.tensor(values, dtype=getattr(torch, dtype))
    if framework in ("tensorflow", "keras"):
        import tensorflow as tf

        return tf.constant
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.array
    if framework == "mxnet":
        import mxnet as mx

        return lambda values, dtype="float32": mx.nd.array(values, dtype=dtype)
    import numpy as np

    return lambda values, dtype="float32": np.array(values, dtype)


class Front(NamedTuple):
    """horoplug's module for a framework on a rank, and what makes a tensor."""

    hvd: Any
    tensor: Any
    rank: int


DEADLOCK = "deadlock: .*Rank 0 waits for '{0}' .*rank 1 waits for '{1}'"
CALLS = {
    "operands of average": (
        lambda f: f.hvd.allreduce(f.tensor([1.0]), average=True, op=f.hvd.Sum),
        "op= supersedes average=",
    ),
    "process set": (
        lambda f: f.hvd.add_process_set([0, 5]),
        "process set of ranks 0, 5: rank 5 does not exist; there are ranks 0 to 1",
    ),
    "no tensors": (lambda f: f.hvd.grouped_allreduce([]), "grouped_allreduce needs at least one"),
    "dimensions": (
        lambda f: f.hvd.allgather(f.tensor([[1.0, 2.0]] if f.rank else [1.0]), name="rows"),
        "'allgather.rows': mismatched shape: .* on rank 0 but .* on rank 1",
    ),
    "dtypes": (
        lambda f: f.hvd.allreduce(f.tensor([1, 2], ["int32", "float32"][f.rank]), name="w"),
        "'allreduce.w': mismatched data type: int32 on rank 0 but float32 on rank 1",
    ),
    "operations": (
        lambda f: (f.hvd.allreduce if f.rank else f.hvd.broadcast)(
            f.tensor([1.0]), name="w", **({} if f.rank else {"root_rank": 0})
        ),
        DEADLOCK.format("broadcast.w", "allreduce.w"),
    ),
    "names": (
        lambda f: f.hvd.allreduce(f.tensor([1.0]), name=f"w{f.rank}"),
        DEADLOCK.format("allreduce.w0", "allreduce.w1"),
    ),
}
NOT_IN_KERAS = {"operands of average", "no tensors"}


def texts_of(framework: str) -> dict[str, str]:
    """On each rank: what each call says, also before init."""
    hvd = importlib.import_module(f"horoplug.{framework}")
    make = tensors(framework)
    texts = {}
    try:
        hvd.rank()
    except ValueError as error:
        texts["before init"] = str(error)
    for name, (call, _) in CALLS.items():
        if framework == "keras" and name in NOT_IN_KERAS:
            continue
        hvd.init()
        try:
            call(Front(hvd, make, hvd.rank()))
        except Exception as error:
            texts[name] = str(error)
    return texts


def check_texts(framework: str, texts: dict[str, str]) -> None:
    """What one rank has got is one line for each mistake, in the framework's words."""
    expected = {"before init": r"not been initialized; use hvd.init\(\)$"}
    expected |= {name: text for name, (_, text) in CALLS.items()}
    for name, text in expected.items():
        if framework != "keras" or name not in NOT_IN_KERAS:
            assert re.search(text, texts[name]), f"{name}: {texts.get(name)}"
            # TensorFlow appends its own words.
            check("framework", texts[name].partition(" [Op:")[0])


def report(framework: str) -> None:
    """On each rank of a job: print what each call says, in lines that are short enough for srun to leave them whole."""
    rank = importlib.import_module(f"horoplug.{framework}").rank
    texts = texts_of(framework)
    for name, text in texts.items():
        sys.stdout.write(f"SAID {json.dumps([rank(), name, text])}\n")
        sys.stdout.flush()


def check_reports(framework: str, output: str, ranks: int) -> None:
    """The same for what each rank of a job has reported."""
    of: dict[int, dict[str, str]] = {}
    for line in re.findall(r"SAID (.*)", output):
        rank, name, text = json.loads(line)
        of.setdefault(rank, {})[name] = text
    assert len(of) == ranks, output
    for texts in of.values():
        check_texts(framework, texts)
