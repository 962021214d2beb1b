"""The arguments of a job that a command line gives, whatever kind of job it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .arguments import Options
from .checks import UsageError
from .standard_input import find_input


def common_fields(options: Options) -> dict[str, Any]:
    """The fields of a :class:`.job_spec.JobSpec` that do not depend on the kind of job. If the ranks' program is
    on standard input, it is read. Errors: UsageError."""
    return {
        "settings": options.settings,
        "command": options.command,
        "ssh": options.remote,
        "step": options.step,
        "forward": options.forward,
        "interfaces": options.interfaces,
        "compat": options.compat,
        "folder": options.output_filename,
        "timestamps": options.prefix_output_with_timestamp,
        "verbose": options.verbose,
        "status": not options.no_status,
        "variables": options.variables,
        "given": find_input(options.command),
    }


@contextlib.contextmanager
def wrong_settings() -> Iterator[None]:
    """Raise the errors of a job's settings as UsageErrors."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--output-filename: {error.strerror}: {error.filename}") from None
    except ValueError as error:  # a variable, or an interface
        raise UsageError(str(error)) from None
