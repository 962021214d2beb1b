"""``horovodrun``, also called ``horoplugrun``: the command line.

Exit codes: 0, that of the rank that failed first (128 + n for signal n), 2 for a wrong command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .arguments import parse
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
        from . import check_build  # only here: it has a look at what is installed

        print(check_build.version() if options.version else check_build.table(gpus=options.verbose))
        return 0
    if options.processes is None:
        raise UsageError("how many processes? Give -np N")
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


if __name__ == "__main__":
    sys.exit(main())
