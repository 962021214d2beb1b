"""The environments of make compat-matrix have the oldest versions that pyproject.toml promises; docs/versions.md lists
all of them."""

import re
from dataclasses import replace

import pytest
import tomllib

from scripts.compat_matrix import page, results
from scripts.compat_matrix.programs import FOLDER, PROGRAMS
from scripts.compat_matrix.rows import ROWS
from tests.harness import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The builds for processors, which are smaller.
NAMES = {"tensorflow": "tensorflow-cpu"}


def promises():
    """The extras' requirements that have an oldest version."""
    for requirements in PROJECT["optional-dependencies"].values():
        for each in requirements:
            found = re.match(r"([\w-]+)(?:\[\w+\])?>=([0-9.]+)", each)
            if found:
                yield NAMES.get(found[1], found[1]), found[2]


def pinned(row):
    return {
        re.sub(r"\[.*", "", name): version
        for name, version in (each.split("==") for each in row.requires)
    }


@pytest.mark.parametrize(("package", "oldest"), sorted(set(promises())))
def test_a_row_has_the_oldest_version_promised(package, oldest):
    versions = [pinned(row)[package] for row in ROWS if package in pinned(row)]
    # 2.1.2 is of 2.1, and what a whole major version promises begins with its first minor one.
    wanted = oldest if "." in oldest else f"{oldest}.0"
    assert any(f"{version}.".startswith(f"{wanted}.") for version in versions), versions


def test_rows_have_the_oldest_and_the_newest_python():
    tags = {row.python for row in ROWS}
    oldest = re.fullmatch(r">=3\.(\d+)", PROJECT["requires-python"])[1]
    newest = re.search(r"Python 3\.\d+ to 3\.(\d+)", (ROOT / "docs" / "installing.md").read_text())[
        1
    ]
    assert tags == {f"cp3{minor}" for minor in range(int(oldest), int(newest) + 1)}


def test_rows_have_exact_versions_and_programs_that_exist():
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert all("==" in each for each in row.requires), row.name
        for program in PROGRAMS[row.programs]:
            for file in re.findall(r"(?<![/\w])\w+\.py", program.command):
                assert (ROOT / FOLDER / file).exists(), file
            for file in re.findall(r"\{examples\}/(\S+)", program.command):
                assert (ROOT / "examples" / file).exists(), file


def test_the_page_lists_the_rows_of_the_table(monkeypatch, tmp_path):
    """After a change of the table: make compat-matrix ONLY=ROW, which writes the page. A run of some rows keeps the
    lines of the others, whose results other machines may have."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert page.text() == page.PAGE.read_text()
    monkeypatch.setattr(
        page, "ROWS", [replace(row, requires=("a==1",), shown=("a",)) for row in ROWS]
    )
    assert page.text().count("| a==1 |") == len(ROWS)
