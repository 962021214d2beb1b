"""Links, files and variables in the documentation exist."""

import re

import pytest

from horoplug.base.config import VARIABLES
from tests.harness import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])
FOLDERS = "benchmarks|csrc|docs|examples|horoplug|requirements|scripts|tests"
# Created by a build, or files of users.
ABSENT = {"horoplug/kernels", "horoplug/kernels.fatbin"}


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.short
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        other = page.parent / target if target else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.short
def test_paths_of_the_repository_exist(page):
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./*-]+)`", page.read_text()):
        assert path in ABSENT or any(ROOT.glob(path.rstrip("/"))), path


@pytest.mark.short
def test_every_environment_variable_is_documented():
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    # Variables that the core reads itself.
    assert documented - {"CPU_KERNELS"} == {variable.name for variable in VARIABLES}


@pytest.mark.short
def test_every_design_page_is_in_the_index():
    folder = ROOT / "docs" / "design"
    index = (folder / "index.md").read_text()
    for page in folder.glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def test_readme_links_every_guide():
    """Those of launchers are in the table of another guide."""
    readme = (ROOT / "README.md").read_text()
    launchers = (ROOT / "docs" / "which-launcher.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        link = f"({page.name})" if page.name.startswith("launch-") else f"(docs/{page.name})"
        assert link in (launchers if page.name.startswith("launch-") else readme), page.name


@pytest.mark.parametrize(("page", "limit"), [("README.md", 6000), ("ARCHITECTURE.md", 12000)])
@pytest.mark.short
def test_overviews_are_short(page, limit):
    assert len((ROOT / page).read_bytes()) <= limit


@pytest.mark.short
def test_pre_commit_has_the_checks_of_make_lint():
    yaml = pytest.importorskip("yaml")
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^lint: \.venv/\.dev lint-types\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    checks = re.findall(r"^\t\$\(BIN\)/(.*)", recipe[1], re.MULTILINE)
    # Hooks get the changed files, and repair instead of checking.
    checks = {re.sub(r" (\$\(|--check|--dry-run).*", "", check) for check in checks}
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = {re.sub(r" -i$", "", hook["entry"].removeprefix(".venv/bin/")) for hook in hooks}
    assert entries == checks | {"make lint-types"}
