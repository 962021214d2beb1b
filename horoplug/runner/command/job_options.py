"""The arguments of a job that a command line gives, whatever kind of job it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from horoplug.runner.checks import UsageError
from horoplug.runner.job.standard_input import find_input

from .arguments import Options


def common_fields(options: Options) -> dict[str, Any]:
    """The fields of a JobSpec that do not depend on the kind of job. If the ranks' program is
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
        raise unusable_folder(error) from None
    except ValueError as error:  # a variable, or an interface
        raise UsageError(str(error)) from None


def unusable_folder(error: OSError) -> UsageError:
    """The folder for the output cannot be used."""
    why = f"{error.strerror}: {error.filename}"
    return UsageError(lambda t: f"{t.output}: {why}")
