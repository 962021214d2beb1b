"""Replaces the launcher's process by mpirun or jsrun, with the command line of :mod:`horoplug.runner.mpi.mpirun`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from horoplug.runner.checks import UsageError
from horoplug.runner.command.arguments import Options
from horoplug.runner.command.job_options import unusable_folder
from horoplug.runner.environment import DECIDED, set_variable
from horoplug.runner.hosts.hosts import Host, assign_ranks
from horoplug.runner.start.allocation import lsf_hosts, scheduler
from horoplug.runner.start.ssh import Ssh

from . import mpirun

_VERSION_SECONDS = 20.0
# Variables with which users replace ssh for the daemons of mpirun.
_AGENTS = (
    *("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC"),
    *("I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
)


def launch(options: Options, hosts: Sequence[Host]) -> NoReturn:
    """Replace this process by mpirun or jsrun. Errors: UsageError."""
    arguments, env = command(options, hosts, {})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(arguments[0], arguments, env)


def command(
    options: Options, hosts: Sequence[Host], variables: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command, beginning with mpirun's or jsrun's path, and its environment.

    ``variables``: further variables for the ranks. Creates the folders for the output. Errors: UsageError."""
    env = environment(options, os.environ) | dict(variables)
    name = "jsrun" if options.controller == "jsrun" else "mpirun"
    program = shutil.which(name)
    if program is None:
        raise UsageError(
            f"there is no {name} on PATH; leave out --{options.controller} to start the ranks without MPI"
        )
    size = options.num_proc or 1
    if name == "jsrun":
        if hosts:
            raise UsageError("--jsrun takes the hosts of the LSF job; leave out -H")
        hosts = lsf_hosts(os.environ)
    elif hosts:
        assign_ranks(hosts, size)
    implementation = mpirun.JSRUN if name == "jsrun" else _implementation(program, env)
    env = _library(program, implementation, env) | env
    request = mpirun.Request(
        processes=size,
        hosts=hosts,
        allocated=is_allocated(os.environ),
        forwarded=mpirun.forwarded(env, options.forward),
        root=os.geteuid() == 0,
        tcp=options.tcp,
        timestamps=options.prefix_output_with_timestamp,
        output=options.output_filename and options.output_filename.absolute(),
        binding=options.binding_args,
        more=options.mpi_args,
        ssh=options.remote,
        ssh_options=_ssh_options(options.remote)
        if hosts and not any(env.get(each) for each in _AGENTS)
        else (),
        interfaces=options.interfaces,
    )
    try:
        line = implementation.line(request)
    except ValueError as error:  # shlex raises it
        why = str(error).lower()
        raise UsageError(lambda t: f"{t.mpi_args}: {why}") from None
    env = line.variables | env
    try:
        for folder in line.folders:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_folder(error) from None
    for remark in line.remarks:
        print(f"horovodrun: {remark}", file=sys.stderr)
    arguments = [program, *line.arguments, *options.command]
    if options.verbose:
        print("horovodrun:", *arguments, file=sys.stderr)
    return arguments, env


def is_allocated(env: Mapping[str, str]) -> bool:
    """Whether this process runs in the job of a scheduler from which mpirun gets its hosts."""
    found = scheduler(env)
    return found is not None and found.name != "SageMaker"  # mpirun does not know it


def environment(options: Options, outer: Mapping[str, str]) -> dict[str, str]:
    """The environment of mpirun, and so of the ranks, without the rank of another job: MPI assigns ranks."""
    env = dict(outer)
    for name in set(DECIDED) - {"CONTROLLER", "CPU_OPERATIONS"}:
        for prefix in ("HOROPLUG_", "HOROVOD_", "_HOROVOD_"):
            env.pop(prefix + name, None)
    for name, value in options.settings.items():
        set_variable(env, name, value)
    if options.interfaces:
        set_variable(env, "GLOO_IFACE", ",".join(options.interfaces))
    env |= options.variables
    env["PYTHONUNBUFFERED"] = "1"
    if options.compat:
        from horoplug.compat import python_path

        env["PYTHONPATH"] = python_path(env)
    return env


def _ssh_options(ssh: Ssh) -> tuple[str, ...]:
    """Options of ssh as in start/ssh.py. ssh must not ask questions. It must end if its host has vanished, because Open
    MPI's mpirun learns of the loss from that."""
    check = f"StrictHostKeyChecking={ssh.host_key_check}"
    options = ("BatchMode=yes", check, "ServerAliveInterval=5")
    return tuple(word for option in options for word in ("-o", option))


def _implementation(program: str, env: Mapping[str, str]) -> mpirun.Implementation:
    try:
        done = subprocess.run(
            [program, "--version"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{program} --version has not ended within {_VERSION_SECONDS:g} s"
        ) from None
    except OSError as error:
        raise UsageError(f"{program} cannot be run: {error.strerror}") from None
    text = done.stdout.decode(errors="replace")
    found = mpirun.recognise(text)
    if found is None:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise UsageError(
            f"{program} belongs to no MPI that horovodrun knows: --version says {first[:200]!r}; "
            "start the job with that mpirun directly, without horovodrun"
        )
    return found


def _library(
    program: str, implementation: mpirun.Implementation, env: Mapping[str, str]
) -> dict[str, str]:
    """The variables that make mpi4py load the library of this mpirun, if that is found beside it."""
    if not implementation.library or env.get("MPI4PY_LIBMPI") or env.get("MPI4PY_MPIABI"):
        return {}
    prefix = Path(program).resolve().parent.parent
    for folder in ("lib", "lib64", "lib/release", f"lib/{platform.machine()}-linux-gnu"):
        if (file := prefix / folder / implementation.library).exists():
            return {"MPI4PY_LIBMPI": str(file)}
    return {}
