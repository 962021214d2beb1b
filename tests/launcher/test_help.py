"""``help`` of ``horoplug.run``."""

import pytest

from tests.harness import help_pages
from tests.harness.leftovers import nothing_is_left as nothing_is_left

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PAGES = "horoplug", "run.md"


@pytest.mark.short
def test_help_says_all_that_it_has_to():
    help_pages.check_documentation(*PAGES)


@pytest.mark.short
def test_examples_of_help(tmp_path):
    help_pages.check_examples(tmp_path, *PAGES)
