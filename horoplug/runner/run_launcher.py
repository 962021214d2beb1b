"""The launcher process of ``horoplug.run``: ``horovodrun`` with an exchange for the function and the results.

It is a separate process because a launcher takes over the signal handlers and all children of its process, while
``horoplug.run`` may be called in a notebook's kernel. Arguments: the pid of the caller; the descriptors of a pipe for
the outcome, of the file with the function, and of a file for each rank's result, separated by commas; the flags of
horovodrun."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from horoplug.base.config import value
from horoplug.base.variables import SECRET_BYTES

from . import mpirun_launch
from .arguments import Options, parse
from .blame import describe
from .checks import UsageError
from .exchange import Exchange
from .hosts import Host, assign_ranks
from .launch import as_scheduled, given_hosts, make_job
from .network_check import candidates
from .preflight import StartError
from .run_task import ADDRESS, PORT, SALT, SECRET, secret_of


def main(arguments: Sequence[str]) -> int:
    """Run the job and write its outcome to the pipe as JSON.

    Keys: ``usage`` for a UsageError, else ``code``, ``text``, ``returned``, ``raised`` and ``problems``."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != int(arguments[0]):
        return 1
    pipe, function, *results = map(int, arguments[1].split(","))
    for fd in (pipe, function, *results):
        os.set_inheritable(fd, False)
    try:
        options = as_scheduled(parse(arguments[2:]))
        run = _run if options.controller == "gloo" else _run_with_mpi
        outcome = run(options, function, results)
    except UsageError as error:
        outcome = {"usage": str(error)}
    with open(pipe, "w", encoding="utf-8") as file:
        json.dump(outcome, file)
    return 0


def _run(options: Options, function: int, results: Sequence[int]) -> dict[str, Any]:
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
    return _outcome(exchange, code, job.verdict)


def _run_with_mpi(options: Options, function: int, results: Sequence[int]) -> dict[str, Any]:
    """Run the job like :func:`_run`, but let mpirun start and end the ranks.

    mpirun does not encrypt the variables that it passes on. So they contain the secret only if it cannot be derived
    from a file with a key (HOROPLUG_SECRET_FILE)."""
    secret = secrets.token_bytes(SECRET_BYTES)
    given = {SECRET: base64.b64encode(secret).decode()}
    if file := value("SECRET_FILE"):
        given = {SALT: secrets.token_hex()}
        try:
            secret = secret_of(file, given[SALT])
        except ValueError as error:
            raise UsageError(str(error)) from None
    hosts = given_hosts(options) or []
    exchange = Exchange(secret, _address(options, hosts), function, results)
    try:
        command, env = mpirun_launch.command(
            options,
            hosts,
            {ADDRESS: exchange.address, PORT: str(exchange.port)} | given,
        )
        with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL) as process:
            for number in (signal.SIGINT, signal.SIGTERM):  # mpirun forwards them to the ranks
                signal.signal(number, lambda number, _: process.send_signal(number))
            code = process.wait()
    finally:
        exchange.close()
    name = os.path.basename(command[0])
    verdict = f"{name} {describe(code)}" if code else ""
    return _outcome(exchange, code, verdict)


def _address(options: Options, hosts: Sequence[Host]) -> str:
    """An address at which ranks that mpirun starts reach this process. Errors: UsageError."""
    size = options.num_proc or 1
    placements = assign_ranks(hosts or [Host("localhost", size)], size)
    if all(host.is_local for host in placements) and not mpirun_launch.is_allocated(os.environ):
        return "127.0.0.1"
    try:
        return candidates(placements, options.interfaces)[0]
    except StartError as error:
        raise UsageError(str(error)) from None


def _outcome(exchange: Exchange | None, code: int, text: str) -> dict[str, Any]:
    return {
        "code": code,
        "text": text,
        "returned": sorted(exchange.returned) if exchange else [],
        "raised": exchange.raised if exchange else [],
        "problems": exchange.problems if exchange else {},
    }
