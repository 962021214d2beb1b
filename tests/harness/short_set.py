"""The short set of tests, which ``make test`` runs: for each public function, framework and launcher the main test and
one failure. A test belongs to it by a mark:

    @pytest.mark.short                        # with all its parameters
    @pytest.mark.short("aa-*")                # those whose part in [] matches one of the patterns
    @pytest.mark.short(failure=True)          # the test is about a failure

tests/project/test_short_set.py finds what no test of the set is about. It decides by the text of a test: that of the
test function, with everything of its module and of tests/harness that it refers to, directly or indirectly."""

import ast
import fnmatch
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness import ROOT

MARK = "short"
_FILE = re.compile(r"\b(?:examples|benchmarks|tests/[\w/]+/programs)/[\w/]+\.py\b")
_FOLDERS = ("horovod_api", "horovod_tensorflow_api")  # of tests that a test runs in each rank


def apply(items: list[pytest.Item]) -> None:
    """Remove the mark from tests that none of its patterns matches."""
    for item in items:
        mark = item.get_closest_marker(MARK)
        if mark and mark.args and not any(_matches(item, each) for each in mark.args):
            item.own_markers[:] = [each for each in item.own_markers if each is not mark]


def _matches(item: pytest.Item, pattern: str) -> bool:
    parameters = getattr(item, "callspec", None)
    return fnmatch.fnmatchcase(parameters.id if parameters else "", pattern)


class _Module(NamedTuple):
    definitions: dict[str, str]
    """Name at the top level: its source."""
    imported: dict[str, tuple[Path, str | None]]
    """Name: the file that it comes from, and its name there; None for the module itself."""
    imports: str
    """The import statements, at any level."""


def _file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if module.startswith("tests.") and file.exists():
            return file
    return None


@functools.cache
def _parsed(file: Path) -> _Module:
    text = file.read_text()
    tree = ast.parse(text)
    lines = text.splitlines()
    definitions: dict[str, str] = {}
    for node in tree.body:
        names = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for each in targets if isinstance(each, ast.Name)]
        # With the decorators, whose parameters may be the public names.
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        source = "\n".join(lines[first - 1 : node.end_lineno])
        definitions.update(dict.fromkeys(names, source))
    imported: dict[str, tuple[Path, str | None]] = {}
    imports = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        imports.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = alias.asname or alias.name
                if file_of := _file_of(f"{node.module}.{alias.name}"):
                    imported[name] = file_of, None
                elif file_of := _file_of(node.module):
                    imported[name] = file_of, alias.name
    return _Module(definitions, imported, "\n".join(imports))


def _files(text: str, folder: Path) -> Iterator[Path]:
    """Programs that a test runs by their paths."""
    for path in _FILE.findall(text):
        if (ROOT / path).exists():
            yield ROOT / path
    for name in _FOLDERS:
        if name in text and (folder / name).is_dir():
            yield from (folder / name).glob("*.py")


@functools.cache
def text_of(file: Path, name: str) -> str:
    """The source of a test, and of everything that it refers to in its module and in tests/harness."""
    texts: dict[str, None] = {}
    words: set[str] = set()
    whole: set[Path] = (
        set()
    )  # modules that are imported as a whole: any of the words may name a function of these
    seen: set[tuple[Path, str]] = set()
    todo = {(file, name)}
    while todo:
        seen |= todo
        following = set()
        for here, word in todo:
            module = _parsed(here)
            origin, original = module.imported.get(word, (here, word))
            if original is None:
                whole.add(origin)
            elif origin != here:
                following.add((origin, original))
            source = module.definitions.get(word)
            if source is not None:
                texts |= dict.fromkeys((module.imports, source))
                texts |= {each.read_text(): None for each in _files(source, here.parent)}
                said = set(re.findall(r"\w+", source))
                words |= said
                following |= {(here, each) for each in said}
        following |= {
            (each, word) for each in whole for word in words & _parsed(each).definitions.keys()
        }
        todo = following - seen
    return "\n".join(texts)


class Marked(NamedTuple):
    """A function that is marked."""

    name: str
    ids: list[str]
    """The parameters of its tests, as pytest names them."""
    text: str
    failure: bool
    unused: list[str]
    """The patterns that match none of its tests."""


def marked(items: list[pytest.Item]) -> list[Marked]:
    """The marked functions of these tests."""
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        name = getattr(item, "originalname", None) or item.name
        tests.setdefault((item.path, name), []).append(item)
    found = []
    for (file, name), each in tests.items():
        function = getattr(each[0], "obj", None)
        marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == MARK]
        if not marks:
            continue
        ids = [test.callspec.id for test in each if hasattr(test, "callspec")]
        unused = [
            pattern
            for pattern in marks[0].args
            if not any(_matches(test, pattern) for test in each)
        ]
        fixtures = getattr(each[0], "fixturenames", [])
        text = "\n".join(text_of(file, word) for word in (name, *fixtures))
        failure = bool(marks[0].kwargs.get("failure"))
        found.append(Marked(f"{file.relative_to(ROOT)}::{name}", ids, text, failure, unused))
    return found


_BINDINGS = ("torch", "tensorflow", "keras", "jax", "mxnet", "lightning", "ray", "spark")


def mentions(text: str, public: str) -> bool:
    """Whether a text is about a public function, by its full name in horoplug or in Horovod."""
    binding, name = public.split(".")[1], public.rpartition(".")[2]
    module = rf"(?:horoplug|horovod)\.(?:\w+\.)?{binding}" if binding in _BINDINGS else "horoplug"
    return bool(re.search(rf"\b{module}\b", text) and re.search(rf"\b{re.escape(name)}\b", text))
