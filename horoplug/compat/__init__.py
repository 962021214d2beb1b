"""The name ``horovod`` for programs that cannot be edited: ``import horovod.torch`` gives :mod:`horoplug.torch`.

    python -m horoplug.compat train.py --epochs 3       # what follows is as for python itself
    horovodrun --compat -np 4 python train.py           # for all ranks, and every Python that they start
    import horoplug.compat; horoplug.compat.install()   # from a program that can be edited

``horovod.torch`` *is* ``horoplug.torch``, the same module; the same holds for its submodules, and for what else
:mod:`horoplug.compat.names` lists. What is in Horovod but not in horoplug is an ImportError that says so.
``horovod.__version__`` is that of the Horovod whose interface this is; ``horovod.horoplug_version`` is this package's.
"""

import os
from collections.abc import Mapping
from pathlib import Path

SITE = str(Path(__file__).resolve().parent / "site")
"""Folder with a sitecustomize.py that gives the name to every Python that has the folder on its PYTHONPATH."""


def install() -> None:
    """Have ``horovod`` mean horoplug in this process from now on; do it before anything imports horovod.

    Imports nothing of horovod yet. May be called again. An installed Horovod is put aside, with one line in the log."""
    from horoplug.compat.finder import install

    install()


def python_path(env: Mapping[str, str]) -> str:
    """The PYTHONPATH that gives the name to the Pythons of an environment, and keeps what it had."""
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([SITE, *(path for path in paths if path != SITE)])
