"""Run by every Python that has this folder on its PYTHONPATH, when it starts: makes ``horovod`` mean horoplug there.

Cheap, because most of them will never import it: horoplug itself is imported when ``horovod`` first is. And written for
any Python 3, since a job's programs may start others than the one that has horoplug: no annotations, no f-strings."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder


class _OnFirstImport:
    """Waits in ``sys.meta_path`` until somebody asks for horovod."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != "horovod":
            return None
        try:
            from horoplug.compat.finder import install
        except Exception as error:  # also what a Python that is too old makes of its files
            text = "horovod is to mean horoplug here (horoplug.compat), but " + sys.executable
            text += " cannot import that: " + str(error)
            raise ModuleNotFoundError(text, name="horoplug") from error
        sys.meta_path.remove(self)
        return install().find_spec(fullname, path, target)


def _shadowed():
    """The sitecustomize that would have run without this one. Takes this folder off the path."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if not path or os.path.abspath(path) != here]
    return PathFinder.find_spec("sitecustomize")


sys.meta_path.insert(0, _OnFirstImport())  # type: ignore[arg-type]
_spec = _shadowed()
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
