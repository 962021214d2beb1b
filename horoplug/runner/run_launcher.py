"""The process between ``horoplug.run`` and its ranks: a launcher like ``horovodrun``, with what they exchange.

It is a process of its own because a launcher takes over what a process has only once, signals and all of its children;
the one that calls ``horoplug.run`` may be a notebook's. Arguments: the pid of that one; descriptors of a pipe for the
outcome, of the file with the function, and of one for each rank's result, separated by commas; flags of horovodrun."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

from .arguments import parse
from .checks import UsageError
from .exchange import Exchange
from .launch import make_job
from .run_task import PORT


def main(arguments: Sequence[str]) -> int:
    """The job. Writes its outcome as JSON: ``usage``, or ``code``, ``text``, ``returned``, ``raised``, ``problems``."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != int(arguments[0]):
        return 1
    pipe, function, *results = map(int, arguments[1].split(","))
    for fd in (pipe, function, *results):
        os.set_inheritable(fd, False)
    try:
        outcome = _run(parse(arguments[2:]), function, results)
    except UsageError as error:
        outcome = {"usage": str(error)}
    with open(pipe, "w", encoding="utf-8") as file:
        json.dump(outcome, file)
    return 0


def _run(options: Any, function: int, results: Sequence[int]) -> dict[str, Any]:
    exchange: Exchange | None = None

    def serve(address: str, secret: bytes) -> dict[str, str]:
        nonlocal exchange
        exchange = Exchange(secret, address, function, results)
        return {PORT: str(exchange.port)}

    job = make_job(options, serve=serve)
    try:
        code = job.run()
    finally:
        if exchange is not None:
            exchange.close()
    return {
        "code": code,
        "text": job.verdict,
        "returned": sorted(exchange.returned) if exchange else [],
        "raised": exchange.raised if exchange else [],
        "problems": exchange.problems if exchange else {},
    }
