"""``horovodrun``, also called ``horoplugrun``: the command line.

Exit codes: 0, that of the rank that failed first (128 + n for signal n), 2 for a wrong command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .arguments import Options, parse
from .checks import UsageError, check_command, check_room, slots
from .hosts import parse_hosts

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
        launch(options, parse_hosts(options.hosts) if options.hosts else [])
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

    if options.num_proc is None:
        raise UsageError("how many processes? Give -np N")
    check_room(options.num_proc, slots(options.hosts), options.hosts)
    check_command(options.command)
    try:
        return Job(
            options.command,
            options.num_proc,
            options.settings,
            compat=options.compat,
            folder=options.output_filename,
            timestamps=options.prefix_output_with_timestamp,
            verbose=options.verbose,
            variables=options.variables,
            serve=serve,
        )
    except OSError as error:
        raise UsageError(f"--output-filename: {error.strerror}: {error.filename}") from None


if __name__ == "__main__":
    sys.exit(main())
