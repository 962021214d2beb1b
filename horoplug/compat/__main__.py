"""``python -m horoplug.compat …``: Python itself, with the same arguments, in which ``horovod`` means horoplug.

The process becomes another Python, so that scripts, ``-m``, ``-c``, tracebacks and exit codes are not imitated but
Python's own. Flags before ``-m`` are handed on."""

import os
import sys

from horoplug.compat import python_path


def command(original: list[str], arguments: list[str]) -> list[str]:
    """Python's arguments, given those it was started with (``sys.orig_argv``) and those that follow the module."""
    flags = original[1 : len(original) - len(arguments)]  # ends in: -m horoplug.compat
    option = flags.pop()
    # Also -mhoroplug.compat, and -um horoplug.compat.
    option = option[: -len("horoplug.compat")] if option.startswith("-") else flags.pop()
    if option != "-m":
        flags.append(option.removesuffix("m"))
    return flags + arguments


def main() -> None:
    """Become that Python; never returns."""
    if sys.flags.no_site or sys.flags.ignore_environment:
        sys.exit(
            "python -m horoplug.compat does not work with -S, -E and -I; call horoplug.compat.install() instead"
        )
    env = os.environ | {"PYTHONPATH": python_path(os.environ)}
    os.execve(sys.executable, [sys.executable, *command(sys.orig_argv, sys.argv[1:])], env)


if __name__ == "__main__":
    main()
