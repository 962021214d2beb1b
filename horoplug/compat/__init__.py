"""The name ``horovod`` for programs that cannot be edited: ``import horovod.torch`` gives :mod:`horoplug.torch`.

    python -m horoplug.compat train.py --epochs 3       # arguments as for python itself
    horovodrun --compat -np 4 python train.py           # for all ranks, and every Python that they start
    import horoplug.compat; horoplug.compat.install()   # from a program that can be edited

``horovod.torch`` and ``horoplug.torch`` are the same module object. So are their submodules and the other modules that
:mod:`horoplug.compat.names` lists. Importing a part of Horovod that horoplug lacks raises an ImportError that names the
part.
``horovod.__version__`` is the version of Horovod whose interface is provided; ``horovod.horoplug_version`` is the
version of this package.
"""

import os
from collections.abc import Mapping
from pathlib import Path

SITE = str(Path(__file__).resolve().parent / "site")
"""Folder with a sitecustomize.py, which installs the name in every Python that has the folder on its PYTHONPATH."""


def install() -> None:
    """Make ``import horovod`` import horoplug in this process. Call it before anything imports horovod.

    Idempotent. Imports no module itself. If Horovod is installed, it cannot be imported any more, and one line in the
    log says so."""
    from horoplug.compat.finder import install

    install()


def python_path(env: Mapping[str, str]) -> str:
    """The PYTHONPATH of an environment, with the folder that installs the name as its first entry."""
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([SITE, *(path for path in paths if path != SITE)])
