"""Executed at the start of every Python that has this folder on its PYTHONPATH: makes ``import horovod`` import
horoplug.

It must be cheap, since most processes never import horovod: horoplug is imported on the first import of horovod. It
must run on any Python 3, since a program may start another Python than the one that has horoplug. It therefore uses no
annotations and no f-strings."""

# mypy: allow-untyped-defs, allow-untyped-calls, no-warn-unused-ignores
import importlib.util
import os
import sys
from importlib.machinery import PathFinder


class _OnFirstImport:
    """An entry of ``sys.meta_path`` that installs the real finder on the first import of horovod."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != "horovod":
            return None
        try:
            from horoplug.compat.finder import install
        except Exception as error:  # including SyntaxErrors of a Python that is too old
            text = "horoplug provides horovod here (horoplug.compat), but " + sys.executable
            text += " cannot import horoplug: " + str(error)
            raise ModuleNotFoundError(text, name="horoplug") from error
        sys.meta_path.remove(self)
        return install().find_spec(fullname, path, target)


def _shadowed():
    """The sitecustomize that would have run instead of this one. Removes this folder from the path."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if not path or os.path.abspath(path) != here]
    return PathFinder.find_spec("sitecustomize")


sys.meta_path.insert(0, _OnFirstImport())
_spec = _shadowed()
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
