"""``horovodrun``, also called ``horoplugrun``: the command line.

Exit codes: 0, that of the rank that failed first (128 + n for signal n), 2 for a wrong command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .arguments import Options, parse
from .checks import UsageError, check_command
from .hosts import Host, parse_hostfile, parse_hosts, place

if TYPE_CHECKING:
    from .job import Job


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. ``arguments``: without the program's name."""
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except UsageError as error:
        print(f"horovodrun: {error}", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.version or options.check_build:
        from . import check_build  # only here: it has a look at what is installed

        print(check_build.version() if options.version else check_build.table())
        return 0
    if options.num_proc is None:
        raise UsageError("how many processes? Give -np N")
    if options.controller != "gloo":
        from .mpi_launch import launch

        check_command(options.command)
        launch(options, given_hosts(options) or [])
    for name in ("mpi_args", "binding_args"):
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            print(f"horovodrun: --{flag} has no effect without --mpi or --jsrun", file=sys.stderr)
    return make_job(options).run()


def make_job(
    options: Options, *, serve: Callable[[str, bytes], Mapping[str, str]] | None = None
) -> Job:
    """The job that the options describe; ``serve``: see :class:`horoplug.runner.job.Job`. Errors: UsageError."""
    from .job import Job

    size = options.num_proc or 1
    hosts = given_hosts(options)
    here = hosts is None or any(host.is_local for host in place(hosts, size))
    check_command(options.command, here=here)
    try:
        return Job(
            options.command,
            size,
            options.settings,
            hosts=hosts,
            ssh=options.remote,
            interfaces=options.interfaces,
            compat=options.compat,
            folder=options.output_filename,
            timestamps=options.prefix_output_with_timestamp,
            verbose=options.verbose,
            status=not options.no_status,
            variables=options.variables,
            serve=serve,
        )
    except OSError as error:
        raise UsageError(f"--output-filename: {error.strerror}: {error.filename}") from None
    except ValueError as error:  # a variable, or an interface
        raise UsageError(str(error)) from None


def given_hosts(options: Options) -> list[Host] | None:
    """Where ranks are to run, as far as the flags say it; None: they do not."""
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    return None if options.hostfile is None else parse_hostfile(options.hostfile)


if __name__ == "__main__":
    sys.exit(main())
