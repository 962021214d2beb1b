"""Starts elastic jobs on this host, and the beginning of the programs that run in them."""

import os
import re
import subprocess
import sys

from tests.harness import ROOT

LIMIT = 150  # seconds for a job
# One thread for each rank, since the ranks share the machine's cores.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "HOROVOD_LOG_LEVEL": "fatal", "OMP_NUM_THREADS": "1"}
PRELOADS = {
    "torch": "torch,torch._dynamo,horoplug.torch",  # the optimizers import torch._dynamo
    "jax": "jax,horoplug.jax",
    "tensorflow": "tensorflow,keras,horoplug.tensorflow",
    "keras": "keras,horoplug.keras",
}
"""What to preload for programs that use a framework, see :func:`launcher`."""

PRELUDE = """
import os, random, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
import horoplug as hvd
from horoplug.common.elastic import ObjectState, initialize_again, run_fn
from horoplug.common.objects import broadcast_object
from tests.harness.elastic_process import ME, say
"""
"""The beginning of a short program without a framework; longer ones are files."""


def launcher(preload: str = "") -> list[str]:
    """The command horovodrun. ``preload``: modules, separated by commas, that its processes have imported before they
    begin (see :mod:`tests.harness.preloading_launcher`)."""
    if preload:
        return [sys.executable, "-m", "tests.harness.preloading_launcher", preload]
    return [sys.executable, "-m", "horoplug.runner"]


def start(*arguments: object, preload: str = "", **variables: str) -> subprocess.Popen[str]:
    """Start horovodrun with these arguments, and with these variables in its environment. ``preload``: see
    :func:`launcher`."""
    return subprocess.Popen(
        [*launcher(preload), *map(str, arguments)],
        env=os.environ | ENVIRONMENT | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a launcher, which ends within :data:`LIMIT` seconds."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise AssertionError(f"the job did not end: {process.communicate()}") from None
    return process.returncode, out, err


def launched(*arguments: object, preload: str = "", **variables: str) -> tuple[int, str, str]:
    """Run horovodrun; see :func:`start` and :func:`finish`."""
    return finish(start(*arguments, preload=preload, **variables))


def launcher_lines(err: str) -> list[str]:
    """The lines that the launcher itself has printed."""
    return re.findall(r"^horovodrun: (.*)$", err, re.MULTILINE)
