"""``python -m horoplug.compat …``: runs Python with the same arguments, with horoplug under the name ``horovod``.

The process replaces itself by a new Python process, so that scripts, ``-m``, ``-c``, tracebacks and exit codes behave
exactly as in Python. Python's own flags before ``-m horoplug.compat`` are passed on."""

import os
import sys

from horoplug.compat import python_path


def command(original: list[str], arguments: list[str]) -> list[str]:
    """The arguments for the new Python.

    ``original``: ``sys.orig_argv``; ``arguments``: those that follow ``-m horoplug.compat``."""
    flags = original[1 : len(original) - len(arguments)]  # ends in: -m horoplug.compat
    option = flags.pop()
    # Also -mhoroplug.compat, and -um horoplug.compat.
    option = option[: -len("horoplug.compat")] if option.startswith("-") else flags.pop()
    if option != "-m":
        flags.append(option.removesuffix("m"))
    return flags + arguments


def main() -> None:
    """Replace this process by the new Python; never returns."""
    if sys.flags.no_site or sys.flags.ignore_environment:
        sys.exit(
            "python -m horoplug.compat does not work with -S, -E and -I; call horoplug.compat.install() instead"
        )
    env = os.environ | {"PYTHONPATH": python_path(os.environ)}
    os.execve(sys.executable, [sys.executable, *command(sys.orig_argv, sys.argv[1:])], env)


if __name__ == "__main__":
    main()
