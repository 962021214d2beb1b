"""``help`` of the public names of ``horoplug.keras``."""

import pytest

from tests.harness import help_pages

pytest.importorskip("keras")
pytest_plugins = ["tests.harness.keras_jobs"]
pytestmark = pytest.mark.parametrize("keras_pool", ["tensorflow"], indirect=True)

PAGES = "horoplug.keras", "keras.md"


@pytest.mark.short
def test_help_says_all_that_it_has_to(keras_ranks):
    keras_ranks.run(help_pages.check_documentation, *PAGES)


@pytest.mark.short
def test_examples_of_help(keras_ranks, tmp_path):
    keras_ranks.run(help_pages.check_examples, tmp_path, *PAGES)
