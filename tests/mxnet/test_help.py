"""``help`` of the public names of ``horoplug.mxnet``."""

import pytest

from tests.harness import ROOT, help_pages
from tests.harness.support import Pool

PYTHON = ROOT / ".venv-mxnet" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make environments makes .venv-mxnet")

PAGES = "horoplug.mxnet", "mxnet.md"


@pytest.fixture(scope="module")
def ranks():
    pool = Pool(PYTHON)
    with pool.ranks(2) as job:
        yield job
    pool.close()


@pytest.mark.short
def test_help_says_all_that_it_has_to(ranks):
    ranks.run(help_pages.check_documentation, *PAGES)


@pytest.mark.short
def test_examples_of_help(ranks, tmp_path):
    ranks.run(help_pages.check_examples, tmp_path, *PAGES)
