"""``horovodrun``, also called ``horoplugrun``: the command line.

Exit codes: 0, that of the rank that failed first (128 + n for signal n), 2 for a wrong command line."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence

from .arguments import Options, parse
from .checks import UsageError, check_command, check_room, slots


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
        from . import check_build, circumstances  # only here: they look at what is installed

        # -v is Horovod's flag for the version; with this one it can only mean more of it.
        in_full = options.version or options.verbose
        if not options.check_build:
            print(check_build.version())
        elif in_full:
            print(f"{check_build.table()}\n\n{circumstances.describe(os.environ)}")
        else:
            print(check_build.table())
        return 0
    if options.processes is None:
        options = _as_scheduled(options)
    assert options.processes is not None
    check_room(options.processes, slots(options.hosts), options.hosts)
    check_command(options.command)

    from .job import Job

    try:
        job = Job(
            options.command,
            options.processes,
            options.settings,
            compat=options.compat,
            folder=options.output_folder,
            timestamps=options.timestamps,
            verbose=options.verbose,
        )
    except OSError as error:
        raise UsageError(f"--output-filename: {error.strerror}: {error.filename}") from None
    return job.run()


def _as_scheduled(options: Options) -> Options:
    """As many processes as the scheduler has given slots to the job that this is run in, on its hosts."""
    from .allocation import allocation

    try:
        hosts = None if options.hosts else allocation(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if hosts is None:
        raise UsageError("how many processes? Give -np N")
    return dataclasses.replace(
        options,
        processes=sum(host.slots for host in hosts),
        hosts=",".join(f"{host.name}:{host.slots}" for host in hosts),
    )


if __name__ == "__main__":
    sys.exit(main())
