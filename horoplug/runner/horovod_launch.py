"""``horovod.runner.launch``: the launcher for programs that parse its command line and run the job themselves."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from .command.arguments import Options, parse
from .launch import as_scheduled, main, make_job

# Attributes of Horovod's arguments, and those of horoplug's options.
_RENAMED = {"slots": "slots_per_host", "cooldown_range": "blacklist_cooldown_range"}


def parse_args() -> argparse.Namespace:
    """Parse ``sys.argv``. The result has the attributes of Horovod's arguments, which may be changed before
    :func:`_run_elastic`. Errors: SystemExit for ``--help``, UsageError."""
    options = parse(sys.argv[1:])
    found = argparse.Namespace(
        **{f.name: getattr(options, f.name) for f in dataclasses.fields(Options)}
    )
    for name, ours in _RENAMED.items():
        setattr(found, name, getattr(options, ours))
    found.np, found.min_np, found.max_np = (
        options.num_proc,
        options.min_num_proc,
        options.max_num_proc,
    )
    return found


def _run_elastic(args: argparse.Namespace) -> None:
    """Run the elastic job that the arguments describe. Errors: RuntimeError if it fails, UsageError."""
    names = [field.name for field in dataclasses.fields(Options)]
    values = {name: getattr(args, name) for name in names} | {
        ours: getattr(args, name) for name, ours in _RENAMED.items()
    }
    job = make_job(as_scheduled(Options(**values)))
    if job.run():
        raise RuntimeError(job.verdict)


_run = _run_static = _run_elastic


def run_commandline() -> None:
    """Run ``horovodrun`` with ``sys.argv``. Raises SystemExit if the job fails."""
    if code := main():
        sys.exit(code)
