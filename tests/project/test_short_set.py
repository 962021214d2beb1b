"""The short set of tests, which ``make test`` runs, is complete: see tests/harness/short_set.py."""

import re

import pytest

from conftest import ALL_TESTS
from horoplug import cli
from horoplug.common.variants import operation_of
from horoplug.rendezvous.bootstrap.launcher_environment import LAUNCHERS
from tests.harness import ROOT, public_api, short_set

pytestmark = pytest.mark.short

PAGES = sorted(public_api.PAGES.glob("*.md"))
# Where the tests of a module are that has none in the set, with the reason.
ELSEWHERE = {"horoplug.lightning": "make test-integrations, which installs Lightning"}
BINDINGS = ("jax", "keras", "mxnet", "ray", "run", "spark", "tensorflow", "torch")


def public_names(page):
    """The names on a page of the API reference; of a module of operations, those of the operations."""
    names = {}
    for name in public_api.on_page(page.name):
        if page.stem == "index":  # names that all modules share
            name = name.replace(".torch.", ".")
        stub = ROOT / (name.replace(".", "/") + ".pyi")
        generated = name.endswith(".operations")  # by the build
        functions = re.findall(r"^def (\w+)", stub.read_text(), re.MULTILINE) if generated else []
        names |= {f"{name}.{operation_of(each)}": None for each in functions} or {name: None}
    return [name for name in names if name.rpartition(".")[0] not in ELSEWHERE]


@pytest.fixture(scope="module")
def marked(request):
    items = request.config.stash[ALL_TESTS]
    collected = {item.path.parent for item in items}
    if not {file.parent for file in ROOT.glob("tests/*/test_*.py")} <= collected:
        pytest.skip("only a part of the tests was collected")
    return short_set.marked(items)


def test_every_pattern_of_a_mark_selects_a_test(marked):
    assert {test.name: test.unused for test in marked if test.unused} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_public_function_has_a_test(marked, page):
    missing = [
        name
        for name in public_names(page)
        if not any(short_set.mentions(test.text, name) for test in marked)
    ]
    assert missing == [], "mark its main test: tests/harness/short_set.py"


@pytest.mark.parametrize("module", BINDINGS)
def test_every_module_has_a_test_of_a_failure(marked, module):
    assert any(
        test.failure and re.search(rf"\b(?:horoplug|horovod)\.{module}\b", test.text)
        for test in marked
    )


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_every_launcher_has_a_test(marked, launcher):
    assert any(launcher.name in test.ids or launcher.rank in test.text for test in marked)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_test(marked, command):
    assert any(f'horoplug("{command}"' in test.text for test in marked)
