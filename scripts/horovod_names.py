"""Writes horoplug/compat/surface.py: the names that each module of Horovod has, from a clone of its repository.

    python scripts/horovod_names.py path/to/horovod
    python scripts/horovod_names.py --page docs/horovod-names.md

The second command writes the page of these names, by the tables of horoplug.compat. It needs no clone.

Reads the sources of the tag that horoplug.compat.names.VERSION names, and imports nothing of them. Names are facts;
nothing else is taken from the sources."""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from horoplug.compat import attributes  # noqa: E402
from horoplug.compat.names import MISSING, MODULES, VERSION  # noqa: E402

HEADER = f'''"""The names in the modules of Horovod {VERSION} that horoplug has. Written by
scripts/horovod_names.py; do not edit.

``OWN``: the names that a module defines. ``IMPORTED``: those that it imports from other modules of Horovod, by module;
``name=original`` if it imports ``original`` as ``name``, and ``name=`` if ``name`` is a module."""

from typing import Final

from horoplug.compat.names import table

'''
FOOTER = """
IMPORTED: Final[dict[str, dict[str, str]]] = {}
for _key, _names in _IMPORTED.items():
    _module, _origin = _key.split()
    IMPORTED.setdefault(_module, {})[_origin] = _names
"""


def git(repository: str, *arguments: str) -> str:
    command = ["git", "-C", repository, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, with those inside of conditions."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", ()):
                yield from statements(handler.body)


def names_of(
    module: str, source: str, modules: set[str], is_package: bool
) -> tuple[set[str], dict[str, set[str]]]:
    """The names that a module defines, and those that it imports, by the module that they come from."""
    own: set[str] = set()
    imported: dict[str, set[str]] = {}
    for node in statements(ast.parse(source).body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            base = base[: len(base) - node.level + is_package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            if origin.partition(".")[0] != "horovod":
                continue
            for alias in node.names:
                name = alias.asname or alias.name
                inner = f"{origin}.{alias.name}"
                if inner in modules:
                    imported.setdefault(inner, set()).add(f"{name}=")
                else:
                    text = name if name == alias.name else f"{name}={alias.name}"
                    imported.setdefault(origin, set()).add(text)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.partition(".")[0] == "horovod":
                    imported.setdefault(alias.name, set()).add(f"{alias.asname}=")
    own -= {"__all__", "__version__"} if module != "horovod" else {"__all__"}
    taken = own | {"*"}
    found = {o: {n for n in ns if n.partition("=")[0] not in taken} for o, ns in imported.items()}
    return own, {origin: names for origin, names in found.items() if names}


def assignment(name: str, rows: Mapping[str, Iterable[str]]) -> str:
    """The statement that gives a variable a table of names, as horoplug.compat.names.table reads it."""
    lines = [
        line
        for key, names in rows.items()
        for line in textwrap.wrap(
            f"{key}: {' '.join(sorted(names))}",
            119,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]
    return "\n".join([f'{name}: Final = table("""', *lines, '""")\n'])


PAGE = f"""# Horovod's names

This page is for programs that use names of Horovod {VERSION} beside its documented ones, such as those that begin
with an underscore. With [`--compat`](migrating-from-horovod.md#no-line-to-change), each name of a module of Horovod is
an attribute of horoplug's module, or of another module from which Horovod imports it, unless this page says otherwise.
A name that does not exist is an error of one line:

    horoplug does not provide horovod.torch.mpi_ops._handle_map: a handle keeps its tensors; use poll and synchronize

`scripts/horovod_names.py` writes this page from the tables of `horoplug/compat`. A test compares them with the modules.

## Names without a counterpart

| module | names | instead |
|---|---|---|
"""

MIDDLE = """
## Names that only --compat provides

| module | names |
|---|---|
"""

END = """
## Modules without a counterpart

Nothing inside of these modules exists.

"""


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def write_page(path: str) -> None:
    rows = [PAGE]
    for module in sorted({*MODULES, "horovod.runner"}):
        by_advice: dict[str, list[str]] = {}
        for name, advice in attributes.lacking_in(module).items():
            by_advice.setdefault(advice, []).append(name)
        rows += [
            f"| `{module}` | {quoted(names)} | {advice} |\n" for advice, names in by_advice.items()
        ]
    rows.append(MIDDLE)
    for module in sorted(MODULES):
        if names := attributes.equivalents_of(module):
            rows.append(f"| `{module}` | {quoted(names)} |\n")
    rows += [END, *(f"- `{name}`\n" for name in sorted(MISSING))]
    Path(path).write_text("".join(rows))


def main(repository: str) -> None:
    tag = f"v{VERSION}"
    files = git(repository, "ls-tree", "-r", "--name-only", tag, "horovod/").split()
    paths = {
        f[:-3].replace("/", ".").removesuffix(".__init__"): f for f in files if f.endswith(".py")
    }
    found = {
        module: names_of(
            module,
            git(repository, "show", f"{tag}:{paths[module]}"),
            set(paths),
            paths[module].endswith("__init__.py"),
        )
        for module in sorted({*MODULES, "horovod", "horovod.runner"})
    }
    write_tables(
        {module: own for module, (own, _) in found.items() if own},
        {
            f"{m} {o}": ns
            for m, (_, imported) in found.items()
            for o, ns in sorted(imported.items())
        },
    )


def write_tables(own: Mapping[str, Iterable[str]], imported: Mapping[str, Iterable[str]]) -> None:
    """Write surface.py. ``imported``: by the module that imports and the one that has the names."""
    text = HEADER + assignment("OWN", own) + "\n" + assignment("_IMPORTED", imported) + FOOTER
    (ROOT / "horoplug" / "compat" / "surface.py").write_text(text)


if __name__ == "__main__":
    if sys.argv[1] == "--page":
        write_page(sys.argv[2])
    else:
        main(sys.argv[1])
