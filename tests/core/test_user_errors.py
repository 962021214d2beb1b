"""What users read when they make a mistake. Thirty mistakes were drawn by chance from a list of 133 and made in every
front end to which they apply; each is one line that says what is wrong, in the words of that front end. Mistakes in
Spark, Ray, MXNet and under other launchers are made in their folders, and those of Keras' callbacks in tests/keras."""

import ast
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import horoplug
from tests.harness.limits import scaled
from tests.harness.process_groups import begin, new_file
from tests.harness.support import environment
from tests.harness.user_errors import ENVIRONMENT, check, check_texts, texts_of

pytest_plugins = ["tests.harness.jobs"]

SOURCES = Path(horoplug.__file__).parent


def constants(node: ast.expr) -> Iterator[str]:
    """The last string of an expression that makes a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr) and node.values:
        yield from constants(node.values[-1])
    elif isinstance(node, ast.BinOp):
        yield from constants(node.right)
    elif isinstance(node, ast.Lambda):
        yield from constants(node.body)


def test_no_error_text_ends_with_a_period():
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for text in (text for each in node.exc.args for text in constants(each)):
                    assert not text.rstrip().endswith("."), f"{file}:{node.lineno}: {text}"


# ---- launchers ------------------------------------------------------------------------------------------------------

BOTH = {"hosts": "localhost:2", "hostfile": "/nonesuch"}
SEVERAL = {"min_num_proc": 3, "max_num_proc": 2, "hosts": "localhost:4"}
MISTAKES = [
    ("-np 0 true", {"num_proc": 0}, "at least 1 is wanted, not 0"),
    ("-np 2 nosuchprogram", None, "there is no program 'nosuchprogram'"),
    ("-np 2 -H a:x true", {"hosts": "a:x"}, "wants host:slots,host:slots, .* not 'a:x'"),
    ("-np 5 -H localhost:2 true", {"num_proc": 5, "hosts": "localhost:2"}, "5 is more than .*: 2 slots; give fewer"),
    ("-np 2 -H localhost:2 -hostfile /nonesuch true", BOTH, "hostfile: not allowed with"),
    ("-np 2 --min-np 3 --max-np 2 -H localhost:4 true", SEVERAL, "min.* 3 is more than .*max.* 2"),
    ("-np 2 --start-timeout -1 true", {"start_timeout": -1}, "a positive number of seconds is wanted, not '-1'"),
    ("-np 2 train.py", None, "did you mean python train.py"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "text"), [(flags, text) for flags, _, text in MISTAKES])
def test_mistakes_at_the_command_line(flags, text, tmp_path):
    (tmp_path / "train.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "horoplug.runner", *flags.split()],
        env=environment(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 2
    line = done.stderr.removesuffix("\n")
    assert re.search(f"^horovodrun: .*{text}", line), line
    check("horovodrun", line)


@pytest.mark.parametrize(("arguments", "text"), [(a, t) for _, a, t in MISTAKES if a])
def test_mistakes_in_a_call_of_run(arguments, text):
    with pytest.raises(ValueError, match=text) as caught:
        horoplug.run(time.time, **{"num_proc": 2, **arguments})
    check("horoplug.run", str(caught.value))


# ---- frameworks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "framework",
    ["numpy", "torch", "tensorflow", "keras", "jax"],
)
@pytest.mark.short("numpy", failure=True)
def test_mistakes_in_frameworks(pool, framework):
    pytest.importorskip(framework)
    with pool.ranks(2, init=False, env=ENVIRONMENT) as ranks:
        for texts in ranks.run(lambda: texts_of(framework)):
            check_texts(framework, texts)


def in_place() -> str:
    import numpy as np

    import horoplug.numpy as hvd

    array = np.ones((3, 4), np.float32)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only") as caught:
        hvd.allreduce_(array)
    return str(caught.value)


def without_memory() -> str:
    """Rank 1 has no memory for the result."""
    import numpy as np

    import horoplug.numpy as hvd

    array = np.ones(20 << 20, np.float32)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if hvd.rank() == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(
            resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20), limits[1])
        )
    try:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allgather(array, name="rows")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return str(caught.value)


def stopped() -> str:
    import numpy as np

    import horoplug.numpy as hvd

    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(np.ones(3), name="w")
    return str(caught.value)


def test_failures_name_operation_and_rank(pool):
    with pool.ranks(2) as ranks:
        for text in ranks.run(in_place):
            check("framework", text)
    with pool.ranks(2) as ranks:
        for text in ranks.run(without_memory):
            assert text == "'allgather.rows' failed: rank 1: out of memory"
    with pool.ranks(2, env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "2"}) as ranks:
        ranks.start(stopped)
        waiting, sleeping = ranks.workers
        try:
            text = waiting.receive().value
        finally:
            sleeping.kill()
            waiting.kill()
        assert re.search("'allreduce.w' failed: .* waiting for rank 1, which does not answer", text)
        assert "HOROVOD_GLOO_TIMEOUT_SECONDS sets this limit" in text
        check("framework", text)


# ---- torch.distributed ----------------------------------------------------------------------------------------------


def texts_of_groups(file: str) -> dict[str, str]:
    """On each rank: what each call says."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["HOROVOD_RANK"])
    ones = torch.ones
    calls = {
        "dtypes": lambda: dist.all_reduce(ones(2, dtype=[torch.int32, torch.float32][rank])),
        "list": lambda: dist.all_gather([ones(2)], ones(2)),
        "src": lambda: dist.broadcast(ones(2), 7),
        "in place": lambda: dist.all_reduce(ones(1).expand(4)),
        "operations": lambda: dist.all_reduce(ones(2)) if rank else dist.broadcast(ones(2), 0),
    }
    texts = {}
    begin(file, seconds=2.0)
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            texts[name] = str(error)
    dist.destroy_process_group()
    return texts


def texts_of_starts(file: str) -> dict[str, str]:
    """On each rank: the error of groups that cannot be created."""
    import torch.distributed as dist

    rank = int(os.environ["HOROVOD_RANK"])
    wrong = {
        "secret": [{"HOROPLUG_SECRET_KEY": "zz"}] * 2,
        "encryption": [{"HOROPLUG_ENCRYPT": "1"}, {}],
        "no library": [{"HOROPLUG_ENCRYPT": "1", "HOROPLUG_LIBCRYPTO": "/nonesuch"}] * 2,
    }
    texts = {}
    before = dict(os.environ)
    for number, (name, variables) in enumerate(wrong.items()):
        os.environ.update(variables[rank])
        store = dist.FileStore(f"{file}-{number}", 2)
        limit = timedelta(seconds=10)
        try:
            dist.init_process_group("horoplug", store=store, rank=rank, world_size=2, timeout=limit)
        except Exception as error:
            texts[name] = str(error)
        os.environ.clear()
        os.environ.update(before)
    return texts


IN_GROUPS = {
    "dtypes": "^rank .: ranks disagree about 'allreduce.*data type: int32 on rank 0 but float32 on",
    "list": "^all_gather takes a list of one tensor for each of the 2 ranks, got 1$",
    "src": "root rank 7 does not exist; there are ranks 0 to 1$",
    "in place": r"share memory, as after expand\(\), .*; pass a copy \(.contiguous\(\)\)$",
    "operations": r"^rank .: timeout of the process group: .*argument timeout of init_process_group",
    "secret": r"HOROPLUG_SECRET_KEY=\(not shown\) is wrong: it must be 32 bytes as hex or base64$",
    "encryption": "^rank 0 encrypts .* rank 1 does not; set HOROPLUG_ENCRYPT alike on every rank$",
    "no library": "^HOROPLUG_ENCRYPT=1 needs OpenSSL's libcrypto.*/nonesuch.*HOROPLUG_LIBCRYPTO",
}


def test_mistakes_in_process_groups(pool, tmp_path):
    pytest.importorskip("torch")
    with pool.ranks(2, init=False) as ranks:
        for run in texts_of_starts, texts_of_groups:
            file = new_file(tmp_path)
            for texts in ranks.run(lambda run=run, file=file: run(file)):
                assert texts
                for name, text in texts.items():
                    assert re.search(IN_GROUPS[name], text), f"{name}: {text}"
                    check("torch.distributed", text)
