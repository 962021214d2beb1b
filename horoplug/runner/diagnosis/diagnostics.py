"""The diagnostics of ``horovodrun --check-build -v``: the launcher and the scheduler of this process, and the MPI
library that mpi4py would load. A program that is started in the same way finds the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from horoplug.base.config import Config
from horoplug.rendezvous.bootstrap import launcher_environment as launched
from horoplug.rendezvous.bootstrap import over_tcp
from horoplug.rendezvous.bootstrap.bootstrap import tcp_bootstrap_address
from horoplug.rendezvous.bootstrap.job_key import key_file
from horoplug.runner.checks import UsageError
from horoplug.runner.start.allocation import allocation, scheduler

# Runs in a process of its own, since loading an MPI library may have any side effect. MPI is not initialised.
_LIBRARY_PROGRAM = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from horoplug.mpi.libraries import loaded_libraries
print("mpi4py " + mpi4py.__version__ + ", MPI standard %d.%d" % MPI.Get_version())
print(" and ".join(loaded_libraries()) or "a library that is part of mpi4py")
print(MPI.Get_library_version().splitlines()[0].strip("\\0 "))
print(mpi4py.rc.thread_level if mpi4py.rc.threads else "single")
"""
# Initialises MPI as a job of one process.
_INITIALISED_PROGRAM = """
from mpi4py import MPI
from horoplug.mpi.cuda import describe
from horoplug.mpi.thread import thread_level
print(thread_level())
print(describe(MPI))
"""
_LAUNCHER_PREFIXES = (
    "OMPI_",
    "PMI_",
    "PMIX_",
    "PRTE_",
    "HYDI_",
    "HYDRA_",
    "MPI_LOCAL",
    "PALS_",
    "SLURM_",
)
_SECONDS = 30


def describe(env: Mapping[str, str]) -> str:
    """The whole report, for the terminal."""
    sections = {"Launcher": _launcher(env), "Scheduler": _scheduler(env), "MPI": _mpi()}
    return "\n\n".join(
        f"{title}:\n" + "\n".join(f"    {line}" for line in lines)
        for title, lines in sections.items()
    )


def _launcher(env: Mapping[str, str]) -> list[str]:
    if launched.has_own_variables(env):
        names = ("RANK", "SIZE", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT")
        own = _shown(env, [f"{p}_{name}" for name in names for p in ("HOROPLUG", "HOROVOD")])
        lines = [f"horovodrun, or a launcher that sets its variables: {own}"]
        return lines + _overridden(env, launched.candidates(env))
    found = launched.candidates(env)
    if not found:
        lines = ["none: no variable of any launcher is set, so a program would be rank 0 of 1"]
        if line := launched.inherited(env):
            lines = [f"none: {line}"]
        elif env.get("SLURM_JOB_ID"):
            lines.append("(a job of Slurm, but no step: srun starts ranks, not the batch script)")
        return lines
    lines = [f"{found[0].name}: {_shown(env, found[0].variables)}"]
    try:
        process = launched.recognise(env)
    except ValueError as error:
        return [*lines, f"but that is an error: {error}"]
    if process is None:
        lines.append("a job of one process")
    else:
        lines.append(f"this process is rank {process.rank} of {process.size}")
        lines += [_where(env, process)]
    # Another row may have the same variables as the first one.
    return lines + _overridden(env, [each for each in found[1:] if each.rank != found[0].rank])


def _overridden(env: Mapping[str, str], launchers: list[launched.Launcher]) -> list[str]:
    return [
        f"ignored, since the one above takes precedence: {x.name}: {_shown(env, x.variables)}"
        for x in launchers
    ]


def _where(env: Mapping[str, str], process: launched.LaunchedProcess) -> str:
    try:
        config = Config.from_env(env)
    except ValueError as error:
        return f"but there is an error: {error}"
    address = tcp_bootstrap_address(config, process)
    if address is None:
        return "the ranks bootstrap over MPI, through mpi4py"
    on, port = " or ".join(over_tcp.candidate_hosts(config, address)), config.rendezvous_port
    at = f"one of {over_tcp.PORTS} secret ports" if port is None else f"port {port}"
    key = key_file() if config.secret_key is None else "HOROPLUG_SECRET_KEY"
    return f"the ranks find rank 0 on {on}, at {at}, with a secret derived from {key}"


def _scheduler(env: Mapping[str, str]) -> list[str]:
    found = scheduler(env)
    if found is None:
        return ["none: horovodrun needs to be told how many processes (-np)"]
    lines = [f"{found.name}: {_shown(env, [found.variable])}"]
    try:
        hosts = allocation(env) or []
    except UsageError as error:
        return [*lines, f"but that is an error: {error}"]
    listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
    return [*lines, f"horovodrun without -np takes {listed}"]


def _mpi() -> list[str]:
    try:
        done = _ask(_LIBRARY_PROGRAM, os.environ)
    except subprocess.TimeoutExpired:
        return [f"mpi4py has not opened an MPI library within {_SECONDS} s"]
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if "No module named 'mpi4py'" in reason:
            return ["none: mpi4py is not installed, and only mpirun needs it"]
        return [f"mpi4py cannot use an MPI library: {reason}"]
    versions, library, name, level = done.stdout.splitlines()[-4:]
    asked = os.environ.get("MPI4PY_RC_THREAD_LEVEL") or level
    granted, gpus = _initialised()
    return [
        f"{versions}, with {library}: {name}",
        f"thread level: mpi4py asks for {asked}, the library grants {granted}",
        f"GPUs: the library {gpus}",
    ]


def _initialised() -> tuple[str, str]:
    """The thread level that MPI grants, and its support of GPU memory."""
    alone = {n: v for n, v in os.environ.items() if not n.startswith(_LAUNCHER_PREFIXES)}
    alone["OMPI_MCA_btl"] = "self"  # Open MPI would leave a file in /dev/shm
    try:
        done = _ask(_INITIALISED_PROGRAM, alone)
    except subprocess.TimeoutExpired:
        return f"nothing within {_SECONDS} s", "cannot be asked"
    lines = done.stdout.splitlines()
    if done.returncode != 0 or len(lines) < 2:
        return "nothing outside of an mpirun", "cannot be asked there"
    return lines[-2], lines[-1]


def _ask(program: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        stdin=subprocess.DEVNULL,
    )


def _shown(env: Mapping[str, str], names: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{name}={env[name][:80]}" for name in names if env.get(name, "").strip())
