"""Starts elastic jobs on this host, and the beginning of the programs that run in them."""

import os
import re
import subprocess
import sys

from tests.harness import ROOT

LIMIT = 150  # seconds for a job

PRELUDE = """
import os, random, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
import horoplug as hvd
from horoplug.common.elastic import ObjectState, initialize_again, run_fn
from horoplug.common.objects import broadcast_object

ME = int(os.environ["HOROPLUG_ELASTIC_PROCESS"])

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
"""
"""The beginning of a program without a framework. Each process knows its number, and prints whole lines."""


def start(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Start horovodrun with these arguments, and with these variables in its environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "horoplug.runner", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOROVOD_LOG_LEVEL": "fatal"} | variables,
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


def launched(*arguments: object, **variables: str) -> tuple[int, str, str]:
    """Run horovodrun; see :func:`start` and :func:`finish`."""
    return finish(start(*arguments, **variables))


def launcher_lines(err: str) -> list[str]:
    """The lines that the launcher itself has printed."""
    return re.findall(r"^horovodrun: (.*)$", err, re.MULTILINE)
