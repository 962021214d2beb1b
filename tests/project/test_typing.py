"""mypy --strict and pyright in the project of a user who has installed horoplug: they accept the programs in
tests/project/typed_programs, find the mistakes in those called wrong_*, and know every public name."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections import defaultdict
from pathlib import Path

import pytest
import tomllib

from tests.harness import ROOT, public_api
from tests.harness.limits import scaled

for tool in ("mypy", "basedpyright"):
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"needs {tool}: pip install -r requirements/dev.txt", allow_module_level=True)

PROGRAMS = sorted((ROOT / "tests" / "project" / "typed_programs").glob("*_*.py"))
PROGRAMS = [path for path in PROGRAMS if path.name != "__init__.py"]
# What a user's mypy.ini has for libraries that come without types.
MYPY = """[mypy]
strict = true
python_version = 3.10
[mypy-tensorflow.*,keras.*,mxnet.*,lightning.*,optax.*,jax.*,ray.*,pyspark.*]
ignore_missing_imports = true
"""
ABSENT = [
    name
    for name in ("tensorflow", "keras", "jax", "optax", "mxnet", "lightning", "ray", "pyspark")
    if importlib.util.find_spec(name) is None
]
# The checks of pyright with its default settings. Not all frameworks are installed.
PYRIGHT = {
    "typeCheckingMode": "standard",
    "pythonVersion": "3.10",
    "reportMissingImports": not ABSENT,
}


def environment(folder):
    """The interpreter of an environment in which the package is installed: with the files that the wheel has for type
    checkers, beside the libraries of this environment."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]["*"]
    for kind in ("*.py", *data):
        for path in (ROOT / "horoplug").rglob(kind):
            copy = site / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def program_of_names():
    """A program that imports every public name."""
    names = public_api.public()
    shared = [*public_api.names_of_all_modules(), *public_api.constants()]
    names += [f"{module}.{name}" for module in public_api.FRAMEWORKS for name in shared]
    pairs = [name.rpartition(".")[::2] for name in dict.fromkeys(names)]
    lines = [f"from {module} import {name} as name{i}" for i, (module, name) in enumerate(pairs)]
    return "\n".join([*lines, "", *(f"print(name{i})" for i in range(len(pairs)))]) + "\n"


def run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=scaled(150))
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy(python, folder, cache):
    """(file, line, text) for each error. ``cache``: a folder that is kept until the next run of the tests."""
    (folder / "mypy.ini").write_text(MYPY)
    options = ["--python-executable", python, "--output", "json", "--cache-dir", cache]
    for line in run([sys.executable, "-m", "mypy", *options, "."], folder).splitlines():
        found = json.loads(line)
        if found["severity"] == "error":
            yield found["file"], found["line"], found["message"]


def pyright(python, folder, cache):
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    options = ["--pythonpath", python, "--outputjson"]
    output = run([sys.executable, "-m", "basedpyright", *options], folder)
    for found in json.loads(output)["generalDiagnostics"]:
        if found["severity"] == "error":
            line = found["range"]["start"]["line"] + 1
            yield Path(found["file"]).name, line, found["message"]


CHECKERS = {"mypy": mypy, "pyright": pyright}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The interpreter and the folder of a user's project."""
    folder = tmp_path_factory.mktemp("project")
    for path in PROGRAMS:
        shutil.copy(path, folder)
    (folder / "names_program.py").write_text(program_of_names())
    return environment(tmp_path_factory.mktemp("environment")), folder


@pytest.fixture(scope="module", params=CHECKERS)
def checked(request, project):
    """The name of a type checker, and the errors that it reports: {file: {line: text}}."""
    errors = defaultdict(dict)
    for file, line, text in CHECKERS[request.param](*project, request.config.cache.mkdir("typing")):
        errors[file][line] = text
    return request.param, errors


NAMES = [path.name for path in PROGRAMS]


@pytest.mark.parametrize("name", ["names_program.py", *(n for n in NAMES if n[:5] != "wrong")])
def test_programs_of_users_are_accepted(checked, name):
    assert checked[1][name] == {}


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("wrong")])
def test_mistakes_are_reported(checked, name):
    """A line that ends with ``# wrong: pyright`` uses a library whose types only pyright reads."""
    checker, errors = checked
    source = next(path for path in PROGRAMS if path.name == name).read_text()
    for module in re.findall(r"^import (\w+)", source, re.MULTILINE):
        if module in ABSENT:
            pytest.skip(f"needs {module}")
    expected = [
        number
        for number, line in enumerate(source.splitlines(), 1)
        if line.endswith(("# wrong", f"# wrong: {checker}"))
    ]
    assert sorted(errors[name]) == expected, errors[name]
