"""The launcher process of ``horoplug.run``: ``horovodrun`` with an exchange for the function and the results.

It is a separate process because a launcher takes over the signal handlers and all children of its process, while
``horoplug.run`` may be called in a notebook's kernel. Arguments: the pid of the caller; the descriptors of a pipe for
the outcome, of the file with the function, and of a file for the results, separated by commas; the folder for temporary
files; the flags of horovodrun."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from horoplug.base.config import value
from horoplug.base.variables import SECRET_BYTES
from horoplug.rendezvous.network.addresses import loopback
from horoplug.runner.checks import UsageError
from horoplug.runner.command.arguments import Options, parse
from horoplug.runner.ending.blame import describe
from horoplug.runner.ending.results import Results
from horoplug.runner.hosts.hosts import Host, assign_ranks
from horoplug.runner.launch import as_scheduled, given_hosts, make_job
from horoplug.runner.mpi import mpirun_launch
from horoplug.runner.network.preflight import StartError
from horoplug.runner.network.servers import candidates
from horoplug.runner.terms import Terms

from .exchange import Exchange, ResultFiles
from .run_task import ADDRESS, PORT, SALT, SECRET, secret_of

_NUMBERS: Final = 1 << 32  # the exchange's numbers of processes are less
_TERMS: Final = Terms(timeout="HOROVOD_ELASTIC_TIMEOUT")


class _Ended(NamedTuple):
    """A job that has ended. A process has the number by which the exchange knows it."""

    exchange: Exchange | None
    code: int
    text: str
    """Why the job has failed, in one line."""
    processes: Sequence[int]
    """By rank, in an elastic job those of the last membership. Without a membership, those whose function has
    returned."""
    blamed: int | None = None
    is_elastic: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run the job and write its outcome to the pipe as JSON.

    Keys: ``usage`` for a UsageError, else those of :func:`_collect`. Nothing is unpickled here."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != int(arguments[0]):
        return 1
    pipe, function, results = map(int, arguments[1].split(","))
    for fd in (pipe, function, results):
        os.set_inheritable(fd, False)
    answer: dict[str, Any]
    try:
        options = as_scheduled(parse(arguments[3:]))
        size = options.max_num_proc or options.num_proc or 1
        files = ResultFiles(arguments[2], size, _NUMBERS if options.is_elastic else size)
        run = _run if options.controller == "gloo" else _run_with_mpi
        ended = run(options, function, files)
        answer = _collect(ended, files, results)
    except UsageError as error:
        answer = {"usage": error.text(_TERMS)}
    with open(pipe, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    return 0


def _run(options: Options, function: int, results: ResultFiles) -> _Ended:
    exchange: Exchange | None = None

    def serve(address: str, secret: bytes) -> dict[str, str]:
        nonlocal exchange
        exchange = Exchange(secret, address, function, results)
        return {PORT: str(exchange.port)}

    job = make_job(options, serve=serve, terms=_TERMS)
    try:
        code = job.run()
    finally:
        if exchange is not None:
            exchange.close()
    processes = job.members
    if not processes and exchange is not None:  # the function does not call init()
        processes = sorted(exchange.returned)
    return _Ended(exchange, code, job.verdict, processes, job.failed, options.is_elastic)


def _run_with_mpi(options: Options, function: int, results: ResultFiles) -> _Ended:
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
            options, hosts, {ADDRESS: exchange.address, PORT: str(exchange.port)} | given
        )
        with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL) as process:
            for number in (signal.SIGINT, signal.SIGTERM):  # mpirun forwards them to the ranks
                signal.signal(number, lambda number, _: process.send_signal(number))
            code = process.wait()
    finally:
        exchange.close()
    name = os.path.basename(command[0])
    verdict = f"{name} {describe(code)}" if code else ""
    return _Ended(exchange, code, verdict, range(options.num_proc or 1))


def _address(options: Options, hosts: Sequence[Host]) -> str:
    """An address at which ranks that mpirun starts reach this process. Errors: UsageError."""
    size = options.num_proc or 1
    placements = assign_ranks(hosts or [Host("localhost", size)], size)
    if all(host.is_local for host in placements) and not mpirun_launch.is_allocated(os.environ):
        return loopback()
    try:
        return candidates(placements, options.interfaces, _TERMS)[0]
    except StartError as error:
        raise UsageError(str(error)) from None


def _collect(job: _Ended, files: ResultFiles, target: int) -> dict[str, Any]:
    """The fields of :class:`_Ended` and :class:`.results.Results` that the caller needs. ``files``: where the result or
    exception of a process begins in the caller's file, to which it is moved here."""
    blamed = job.blamed if job.code else None
    sent = Results(job.processes, (), (), {}, lambda _: None)
    if job.exchange is not None:
        sent = job.exchange.results(job.processes).of(blamed)
    problems, places = dict(sent.problems), {}
    for number in sent.raised[:1] or ([] if job.code else sorted(sent.returned)):
        try:
            places[number] = files.move(number, target)
        except OSError as error:
            problems[number] = error.strerror or str(error)
    return {
        "code": job.code,
        "text": job.text,
        "is_elastic": job.is_elastic,
        "processes": [*job.processes],
        "blamed": blamed,
        "returned": sorted(sent.returned),
        "raised": [*sent.raised],
        "problems": problems,
        "files": places,
    }
