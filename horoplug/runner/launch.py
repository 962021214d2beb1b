"""``horovodrun``, also called ``horoplugrun``: the command line.

Exit codes: 0; that of the rank that failed first (128 + n for signal n); 2 for a wrong command line."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .checks import UsageError, check_command, check_folder, reads_program
from .command.arguments import Options, parse
from .command.job_options import common_fields, wrong_settings
from .hosts.hosts import Host, assign_ranks, is_this_host, parse_hostfile, parse_hosts
from .start.allocation import allocation, lsf_hosts, scheduler, why_over
from .terms import COMMAND_LINE, Terms

if TYPE_CHECKING:
    from .job.job import Job


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. ``arguments``: without the program's name."""
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except UsageError as error:
        print(f"horovodrun: {error}", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    check_folder()
    if options.version or options.check_build:
        from .diagnosis import check_build, diagnostics

        # -v is Horovod's flag for the version; together with --check-build it means verbose.
        in_full = options.version or options.verbose
        if not options.check_build:
            print(check_build.version())
        elif in_full:
            print(f"{check_build.table(gpus=True)}\n\n{diagnostics.describe(os.environ)}")
        else:
            print(check_build.table())
        return 0
    options = as_scheduled(options)
    if options.is_elastic and options.controller != "gloo":
        raise UsageError(
            f"--{'mpi' if options.controller == 'mpi' else 'jsrun'}: processes of an MPI job cannot come and go; "
            "give --min-np, --max-np and --host-discovery-script without it"
        )
    if options.controller != "gloo":
        from .mpi.mpirun_launch import launch

        check_command(options.command)
        if program := reads_program(options.command):
            raise UsageError(
                f"mpirun gives standard input to rank 0 only, and {program} reads its program from it: name a script"
            )
        launch(options, given_hosts(options) or [])
    for name in ("mpi_args", "binding_args"):
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            print(f"horovodrun: --{flag} has no effect without --mpi or --jsrun", file=sys.stderr)
    return make_job(options).run()


def make_job(
    options: Options,
    *,
    serve: Callable[[str, bytes], Mapping[str, str]] | None = None,
    terms: Terms = COMMAND_LINE,
) -> Job:
    """The job that the options describe; ``serve``, ``terms``: see :class:`horoplug.runner.job.spec.JobSpec`. Errors:
    UsageError."""
    from .job.job import Job
    from .job.spec import JobSpec

    make_spec = functools.partial(JobSpec, began=time.monotonic(), serve=serve, terms=terms)
    if options.is_elastic:
        from .command.elastic_launch import make_elastic_job

        return make_elastic_job(options, given_hosts(options), make_spec)
    size = options.num_proc or 1
    hosts = assign_ranks(given_hosts(options) or [Host("localhost", size)], size)
    check_command(options.command, here=any(host.is_local for host in hosts))
    with wrong_settings():
        return Job(make_spec(size=size, hosts=hosts, **common_fields(options)))


def given_hosts(options: Options) -> list[Host] | None:
    """The hosts that the flags name; None if they name none. Errors: UsageError."""
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    return None if options.hostfile is None else parse_hostfile(options.hostfile)


def as_scheduled(options: Options) -> Options:
    """Fill in the hosts of the scheduler's job, unless the options name hosts, and the number of its slots as the
    default for -np. (mpirun asks the scheduler for hosts itself.) Errors: UsageError."""
    hosts = None
    named = (options.hosts, options.hostfile, options.host_discovery_script)
    if all(value is None for value in named):
        find = lsf_hosts if options.controller == "jsrun" else allocation
        hosts = find(os.environ) or None
    if hosts is not None and options.num_proc is not None and _is_here(hosts):
        return options
    if hosts is not None and (reason := why_over(os.environ)):
        print(f"horovodrun: {reason}, so its hosts are not used", file=sys.stderr)
        hosts = None
    if hosts is None:
        if options.num_proc is None and not options.is_elastic:
            raise UsageError(lambda t: f"how many processes? Give {t.size} N")
        return options
    slots = sum(host.slots for host in hosts)
    listed = ",".join(
        f"[{name}]:{slots}" if ":" in name else f"{name}:{slots}" for name, slots in hosts
    )
    return dataclasses.replace(
        options,
        # In an elastic job, --min-np and --max-np say how many of the slots are used.
        num_proc=options.num_proc or (None if options.is_elastic else slots),
        hosts=listed if options.controller == "gloo" else None,
        scheduler=scheduler(os.environ),
    )


def _is_here(hosts: Sequence[Host]) -> bool:
    """Whether all hosts are this machine, on which -np may exceed the slots."""
    return all(is_this_host(host.name) for host in hosts)


if __name__ == "__main__":
    sys.exit(main())
