"""The name under which the program imports this package: horoplug, or horovod (:mod:`horoplug.compat`)."""

import sys


def is_compat() -> bool:
    """Whether ``import horovod`` imports horoplug in this process."""
    return any(type(finder).__module__ == "horoplug.compat.finder" for finder in sys.meta_path)


def public_name(module: str) -> str:
    """The name of a module of horoplug for the program. Programs look for "horovod" in the names of classes."""
    return module.replace("horoplug", "horovod", 1) if is_compat() else module
