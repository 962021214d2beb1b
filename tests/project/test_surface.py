"""What the public modules export: names that are documented or Horovod's, and no name of a library or a helper. And how
the texts of errors end."""

import ast
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys

import pytest

from horoplug.base import errors
from horoplug.compat import attributes, names
from tests.harness import ROOT, public_api
from tests.harness.limits import scaled
from tests.harness.support import environment

pytestmark = pytest.mark.short

COLLECTIONS = (
    *public_api.FRAMEWORKS,
    "horoplug.numpy",
    "horoplug.torch.mpi_ops",
    "horoplug.lightning",
)
"""Modules that only collect names of others, so that nothing else is an attribute of them."""
MODULES = sorted(
    {*COLLECTIONS, "horoplug.common.errors", "horoplug.rendezvous.errors", "horoplug.spark"}
    | {name.rpartition(".")[0] for name in public_api.public()}
)
PARTS = {"callbacks", "elastic", "mpi_ops"}
"""Modules that are names of other modules: hvd.elastic."""
# Not for users, although their base classes are exceptions.
INTERNAL = {
    "AbandonedError",
    "DismissedError",
    "LostError",
    "ProbeError",
    "StartError",
    "UsageError",
}


BESIDES = {
    "horoplug.rendezvous.errors": set(vars(errors)),
    "horoplug.spark": {"RankError"},
    "horoplug.ray": {"BaseHorovodWorker"},
    "horoplug.torch.c10d": {"ProcessGroup"},
}
"""What modules export besides, by module."""


def exported(name):
    """``__all__`` of a module; that in its source if what it needs is not installed here."""
    path = ROOT / name.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    try:
        return importlib.import_module(name).__all__
    except ImportError:
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return ast.literal_eval(node.value)
        pytest.skip(f"{name} collects names of what is not installed")


def allowed(name):
    """The names that a module may export."""
    documented = {each.rpartition(".")[2] for each in public_api.public()}
    stub = (ROOT / "horoplug" / "torch" / "operations.pyi").read_text()
    of_operations = set(re.findall(r"^def (\w+)", stub, re.MULTILINE))
    horovods = [each for each, ours in names.MODULES.items() if ours == name]
    of_horovod = set().union(*map(attributes.names_of, horovods))
    return documented | of_operations | {*public_api.constants()} | of_horovod | PARTS


@pytest.mark.parametrize("name", MODULES)
def test_exports_are_documented_or_horovods(name):
    found = exported(name)
    assert len(set(found)) == len(found)
    assert set(found) - allowed(name) - BESIDES.get(name, set()) == set()


@pytest.mark.parametrize("name", COLLECTIONS)
def test_the_module_of_a_framework_has_no_names_beside_those_of_its_all(name):
    found = set(exported(name))
    if name not in sys.modules:
        pytest.skip(f"{name} needs what is not installed here")
    module = importlib.import_module(name)
    if name == "horoplug":
        found |= {each for each in module._LAUNCHER_NAMES if getattr(module, each)}
    folder = os.path.dirname(module.__file__)
    others = {
        each
        for each, value in vars(module).items()
        if not each.startswith("_")
        and not (inspect.ismodule(value) and value.__file__ and value.__file__.startswith(folder))
    }
    assert others <= found
    assert name == "horoplug" or {each for each in found if each not in vars(module)} == set()


@functools.cache
def nodes():
    """The syntax trees of the package."""
    paths = (ROOT / "horoplug").rglob("*.py")
    return [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text()))]


def exceptions():
    """The names of the exception classes of the package."""
    for _, node in nodes():
        if isinstance(node, ast.ClassDef) and any(
            re.search(r"(Error|Exception|Interrupt)$", ast.unparse(base)) for base in node.bases
        ):
            yield node.name


def test_every_exception_is_in_the_reference():
    page = (public_api.PAGES / "index.md").read_text()
    missing = [name for name in exceptions() if not re.search(rf"\b{name}\b", page)]
    assert set(missing) == INTERNAL


def test_star_import_gives_what_a_user_needs():
    """``from horoplug.torch import *``, as programs for Horovod do."""
    code = """
from horoplug.torch import *
init()
assert (rank(), size()) == (0, 1)
assert callable(allreduce_async_) and callable(DistributedOptimizer) and callable(broadcast_object)
assert Average != Sum and elastic.run and Compression.fp16 and global_process_set
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=scaled(100))


def last_texts(node):
    """The string literals with which an expression may end."""
    if isinstance(node, ast.JoinedStr):
        yield from last_texts(node.values[-1])
    elif isinstance(node, ast.BinOp):
        yield from last_texts(node.right)
    elif isinstance(node, ast.IfExp):
        yield from last_texts(node.body)
        yield from last_texts(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node


def test_error_texts_end_without_a_period():
    """As those of Python do."""
    wrong = []
    for path, node in nodes():
        call = node.exc if isinstance(node, ast.Raise) else node
        name = getattr(getattr(call, "func", None), "id", "")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            name = "Error"  # as far as it has a text
        if not isinstance(call, ast.Call) or (
            call is node and not name.endswith(("Error", "Exception"))
        ):
            continue
        for text in (text for argument in call.args for text in last_texts(argument)):
            if re.search(r"[^.]\.$", text.value):
                wrong.append(f"{path.relative_to(ROOT)}:{text.end_lineno}")
    assert wrong == []


def test_docstrings_mark_parameters():
    """``name``: what it is; in a list of them, each begins a line."""
    wrong = []
    for path, node in nodes():
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or path.parts[
            len(ROOT.parts) + 1
        ] in ("ray", "runner", "spark"):
            continue
        init = [each for each in node.body if getattr(each, "name", "") == "__init__"]
        function = init[0] if init else node
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
        for line in (ast.get_docstring(node) or "").splitlines():
            listed = re.match(r"(\w+(?:, \w+)*): ", line)
            if listed and set(listed[1].split(", ")) <= names:
                wrong.append(f"{path.relative_to(ROOT)}: {node.name}: {line}")
    assert wrong == []


def test_a_function_of_the_package_is_searched_for_once():
    program = (
        "import horoplug as hvd\n"
        "assert 'allreduce_' not in vars(hvd)\n"
        "found = hvd.allreduce_\n"
        "assert vars(hvd)['allreduce_'] is found\n"
    )
    subprocess.run(
        [sys.executable, "-c", program], env=environment(), check=True, timeout=scaled(60)
    )
