"""What ``help`` shows of a public name: whether it says all that it has to, and whether its example is right.

An example is an indented block behind a line that begins with "Example". It is code for two ranks. ``hvd`` is the
module of the page, and the names in :data:`NAMES` are imported. A comment at the end of a statement states its value on
both ranks or on each of them, or the exception that it raises:

    hvd.rank()  # -> 0 on rank 0, 1 on rank 1
    hvd.send(x, dest=7)  # raises ValueError
"""

import ast
import contextlib
import importlib
import inspect
import re
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import horoplug
from horoplug.common import basics
from tests.harness import public_api
from tests.harness.public_api import Public

NAMES = {
    "np": "numpy",
    "torch": "torch",
    "tf": "tensorflow",
    "keras": "keras",
    "jax": "jax",
    "jnp": "jax.numpy",
    "optax": "optax",
    "mx": "mxnet",
}
"""Names in examples: module."""

_EXAMPLE = re.compile(r"^Example\b.*:\n\n((?: {4}.*\n|\n)+)", re.MULTILINE)
_RESULT = re.compile(r"#\s*(->|raises)\s*(.*)$")
_BY_RANK = re.compile(r"(.+?) on rank (\d+)(?:, |$)")
_UNITS = {
    r"timeout|seconds|cooldown|interval": r"\bseconds\b",
    r"bytes|_mb\b|threshold": r"\bbytes\b|MiB",
}


# ---- what a docstring says -------------------------------------------------------------------------------------------


def documentation(value: Any) -> str:
    """The docstring of a function or of a class itself, not of its bases."""
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return f"{inspect.cleandoc(text)}\n" if text else ""


def parameters(value: Any) -> list[str]:
    """The names of the parameters of a function, or of the constructor of a class."""
    if inspect.isclass(value):
        own = next((c for c in value.__mro__ if "__init__" in vars(c)), object)
        if not own.__module__.startswith("horoplug.") or issubclass(value, BaseException):
            return []
    names = inspect.signature(value).parameters
    return [name for name in names if not name.startswith("_")]


def _referred(text: str, value: Any) -> Iterator[str]:
    """The documentation of the functions and classes to which a docstring refers for further arguments."""
    for name in re.findall(
        r"arguments[^.]*? are\s+those\s+of\s+:(?:func|class):`~?([\w.]+)`", text
    ):
        module, _, last = name.rpartition(".")
        yield documentation(getattr(importlib.import_module(module or value.__module__), last))


def _has(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def problems_of(name: str, value: Any) -> Iterator[str]:
    """What the documentation of a name lacks."""
    text = documentation(value)
    if not text:
        yield f"{name}: has no docstring"
        return
    prose = _EXAMPLE.sub("", text)
    names = parameters(value)
    if inspect.isclass(value):  # help() of a class also shows its constructor
        prose += inspect.getdoc(vars(value).get("__init__", None)) or ""
    known = prose + "".join(_referred(prose, value))
    for each in names:
        if not _has(rf"\b{each}\b", known):
            yield f"{name}: does not describe the parameter {each}"
        for pattern, unit in _UNITS.items():
            if _has(pattern, each) and not _has(unit, prose):
                yield f"{name}: does not state the unit of the parameter {each}"
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if not method.startswith("_") and inspect.isroutine(function):
                documented = inspect.getdoc(getattr(value, method))
                if not documented:
                    yield f"{name}: the method {method} has no docstring"
    else:
        returned = getattr(value, "__annotations__", {}).get("return")
        first = prose.split()[0]
        is_noun = first in ("A", "An", "The", "Whether", "Number") or first.startswith("`")
        if (
            returned not in (None, "None")
            and not is_noun
            and not _has(r"(?i)\breturn|\bresult\b", prose)
        ):
            yield f"{name}: does not say what it returns"
        if not _has(r"\b([Rr]aises?|Errors)\b", prose):
            yield f"{name}: does not say what it raises"
        if {"tensor", "tensors", "value"} & set(names):
            for word in ("shape|dimension", "dtype"):
                if not _has(word, prose):
                    yield f"{name}: does not mention {word}"
    if not _EXAMPLE.search(text):
        yield f"{name}: has no example"


# ---- examples --------------------------------------------------------------------------------------------------------


def example_of(value: Any) -> str:
    found = _EXAMPLE.search(documentation(value))
    return textwrap.dedent(found[1]) if found else ""


def run_example(source: str, names: Mapping[str, Any], rank: int) -> None:
    """Runs an example. Raises AssertionError if a value is not the one that a comment states."""
    lines = source.splitlines()
    tree = ast.parse(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    known = {name: importlib.import_module(NAMES[name]) for name in used & set(NAMES)}
    known.update(names, __name__="__main__")
    for statement in tree.body:
        assert statement.end_lineno is not None
        comment = _RESULT.search(lines[statement.end_lineno - 1])
        stated = None if comment is None else _on_rank(comment[2], rank)
        code = _code(statement, lines)
        if comment is not None and comment[1] == "raises":
            _expect_error(code, known, str(stated))
            continue
        value = _evaluate(code, statement, known)
        if stated is not None:
            expected = eval(stated, known)
            assert plain(value) == expected, f"{code}: {plain(value)!r}, and not {expected!r}"


def _code(statement: ast.stmt, lines: list[str]) -> str:
    decorators = getattr(statement, "decorator_list", [])
    first = min(each.lineno for each in (*decorators, statement))
    return "\n".join(lines[first - 1 : statement.end_lineno])


def _on_rank(text: str, rank: int) -> str:
    by_rank = {int(number): value for value, number in _BY_RANK.findall(text)}
    return by_rank.get(rank, text) if by_rank else text


def _evaluate(code: str, statement: ast.stmt, known: dict[str, Any]) -> Any:
    if isinstance(statement, ast.Expr):
        return eval(code, known)
    exec(code, known)
    if isinstance(statement, ast.Assign):
        return eval(ast.unparse(statement.targets[0]), known)
    return None


def _expect_error(code: str, known: dict[str, Any], name: str) -> None:
    try:
        exec(code, known)
    except Exception as error:
        found = [each.__name__ for each in type(error).__mro__]
        assert name in found, f"{code}: raises {found[0]}, and not {name}"
    else:
        raise AssertionError(f"{code}: does not raise {name}")


def plain(value: Any) -> Any:
    """A value as lists and numbers."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(each) for each in value)
    for method in ("numpy", "asnumpy"):
        if hasattr(value, method):
            value = getattr(value, method)()
    return value.tolist() if hasattr(value, "tolist") else value


# ---- on the ranks of a job -------------------------------------------------------------------------------------------


def names_of_pages(module: str, pages: tuple[str, ...]) -> list[Public]:
    """The public names on the pages, and those of ``elastic`` that belong to the module."""
    names = [name for page in pages for name in public_api.on_page(page)]
    elastic = f"{module}.elastic."
    if "index.md" in pages:
        shared = public_api.names_of_all_modules()
        names = [*(f"{module}.{name}" for name in shared), *names[len(shared) :]]
        elastic = "horoplug.common.elastic."
    names += [name for name in public_api.on_page("elastic.md") if name.startswith(elastic)]
    return [each for name in names for each in public_api.found(name)]


def check_documentation(module: str, *pages: str) -> None:
    """What ``help`` says about every name on the pages is complete."""
    names = names_of_pages(module, pages)
    found = [problem for each in names for problem in problems_of(each.full_name, each.value())]
    assert not found, "\n" + "\n".join(dict.fromkeys(found))


def check_examples(folder: Path, module: str, *pages: str) -> int:
    """Runs the examples on the ranks of a job, or in a process outside of a job, and returns their number.

    ``folder``: where they may write files."""
    hvd = importlib.import_module(module)
    is_rank = basics.is_initialized()
    failures = []
    count = 0
    with contextlib.chdir(folder):
        for each in names_of_pages(module, pages):
            source = example_of(each.value())
            count += bool(source)
            try:
                rank = basics.rank() if is_rank else 0
                run_example(source, {"hvd": hvd, "horoplug": horoplug}, rank)
            except BaseException as error:
                trace = "".join(traceback.format_exception(error)[-4:])
                failures.append(f"{each.full_name}:\n{trace}")
            if is_rank:
                basics.init()  # does nothing unless the example has left the job
    assert not failures, "\n" + "\n".join(failures)
    return count
