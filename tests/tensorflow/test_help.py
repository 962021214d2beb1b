"""``help`` of the public names of ``horoplug.tensorflow``."""

import pytest

from tests.harness import help_pages
from tests.harness.support import ranks_fixture

pytest.importorskip("tensorflow")
pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aa")

PAGES = "horoplug.tensorflow", "tensorflow.md"


@pytest.mark.short
def test_help_says_all_that_it_has_to(ranks):
    ranks.run(help_pages.check_documentation, *PAGES)


@pytest.mark.short
def test_examples_of_help(ranks, tmp_path):
    ranks.run(help_pages.check_examples, tmp_path, *PAGES)
