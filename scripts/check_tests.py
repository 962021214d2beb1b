"""Checks the layout of tests/, as part of `make lint`:

- A test module imports no other test module: shared code is in tests/harness.
- tests/harness imports no test module.
- Every folder is a package, so that the absolute name of a module is unique.
- Nothing puts the folder tests on sys.path, where its packages torch and jax would hide the frameworks.
- The C++ tests of a folder of csrc are in the folder of this name in csrc/tests.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Short programs that tests run are strings, which are searched as text.
IMPORT_IN_TEXT = re.compile(
    r"\b(?:from|import)\s+(tests(?:\.\w+)*\.test_\w+|tests(?:\.\w+)* import test_\w+)"
)
TESTS_ON_PATH = re.compile(r"""ROOT / ["']tests["']\)""")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each module that may be imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for match in IMPORT_IN_TEXT.finditer(node.value):
                yield node.lineno, match[1].replace(" import ", ".")


def problems(file: Path) -> Iterator[str]:
    text = file.read_text()
    name = file.relative_to(ROOT)
    for line, module in imported(ast.parse(text)):
        if module.startswith("."):
            yield f"{name}:{line}: relative import of {module}: use the absolute name"
        parts = module.split(".")
        if parts[0] == "tests" and any(part.startswith("test_") for part in parts[1:]):
            yield f"{name}:{line}: imports the test module {module}: move shared code to tests/harness"
    for number, line in enumerate(text.splitlines(), 1):
        if "sys.path" in line and TESTS_ON_PATH.search(line):
            yield f"{name}:{number}: puts the folder tests on sys.path: use the repository's root"


def misplaced_cpp_tests() -> Iterator[str]:
    """A line for each C++ test in a folder without counterpart. The simulated GPUs have tests of their own."""
    tests = ROOT / "csrc" / "tests"
    for file in sorted(tests.rglob("*_test.cc")):
        folder = file.parent.relative_to(tests)
        if folder.name != "simulated" and not (ROOT / "csrc" / folder).is_dir():
            yield f"{file.relative_to(ROOT)}: csrc has no folder {folder}"


def main() -> int:
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = [text for file in files for text in problems(file)]
    folders = {
        folder
        for file in files
        for folder in file.parents
        if (ROOT / "tests") in [folder, *folder.parents]
    }
    found += [
        f"{folder.relative_to(ROOT)}: has no __init__.py"
        for folder in sorted(folders)
        if not (folder / "__init__.py").exists()
    ]
    found += misplaced_cpp_tests()
    print("\n".join(found) or f"{len(files)} files of tests: no test module imports another one")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
